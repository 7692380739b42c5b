#include "dmuon/wire/arrival.h"

#include <utility>

namespace dmuon::wire {

void await_arrival(SharedMesh* mesh, c10::Device device, std::vector<Pending> messages,
                   const std::string& what) {
  const std::int64_t number = mesh->watch->reach(watch::Rendezvous::kOperation, what);
  if (messages.empty()) return;
  Lane& lane = (*mesh->lanes)[schedule::Lane::kIntra];
  if (!device.is_cpu()) {
    wait_all(std::move(messages));
    mesh->on_device->add({number, what}, lane.enqueue(device, [] {}, {}), device);
    return;
  }
  // The lane's thread waits: gloo gives a message up whose wait ends early.
  const Event arrived = lane.enqueue(device, [messages] { wait_all(messages); }, {});
  mesh->watch->wait_for(arrived, watch::Rendezvous::kOperation, number, [&] { return what; });
}

}  // namespace dmuon::wire
