#include "dmuon/engine/shared_mesh.h"

#include <array>
#include <utility>

namespace dmuon::engine {

void Turn::take(const void* holder, std::function<void()> issue_rest) {
  if (holder_ == holder) return;
  if (holder_ != nullptr) issue_rest_();
  holder_ = holder;
  issue_rest_ = std::move(issue_rest);
}

void Turn::give_up(const void* holder) {
  if (holder_ == holder) holder_ = nullptr;
}

std::shared_ptr<Watch> SharedMesh::watch_over() {
  // The groups' copies end the same messages.
  const auto give_up = [groups = std::array{row, column, order, verdict}]() mutable {
    for (Group& group : groups) group.give_up();
  };
  auto made = std::make_shared<Watch>(order.store(), order.rank(), order.size(), give_up);
  order.wait_under(made, Rendezvous::kComparison);
  verdict.wait_under(made, Rendezvous::kAgreement);
  return made;
}

void SharedMesh::leave(std::chrono::milliseconds grace) {
  watch->over("its program has ended");
  const Event ends[] = {lanes->intra.enqueue(c10::kCPU, [] {}, {}),
                        lanes->inter.enqueue(c10::kCPU, [] {}, {})};
  bool over = true;
  for (const Event& end : ends) over = end.wait_for(grace) && over;
  if (over) return;
  row.give_up();
  column.give_up();
}

}  // namespace dmuon::engine
