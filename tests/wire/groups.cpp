#include "tests/wire/groups.h"

#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

namespace dmuon::wire {
namespace {

class Disguised final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  const std::string getBackendName() const override { return "disguised"; }
};

}  // namespace

ProcessGroupPtr make_process_group(const StorePtr& store, const std::string& name, int rank,
                                   int size, std::chrono::milliseconds timeout, bool disguise) {
  if (size == 1) return {};
  const auto own_store = c10::make_intrusive<c10d::PrefixStore>(name, store);
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  // One listener for all groups: to make and to end one takes longer than most tests.
  static const auto device = c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  options->devices.push_back(device);
  c10::intrusive_ptr<c10d::Backend> backend;
  if (disguise) {
    backend = c10::make_intrusive<Disguised>(own_store, rank, size, std::move(options));
  } else {
    backend =
        c10::make_intrusive<c10d::ProcessGroupGloo>(own_store, rank, size, std::move(options));
  }
  auto group = c10::make_intrusive<c10d::ProcessGroup>(own_store, rank, size);
  const auto type =
      disguise ? c10d::ProcessGroup::BackendType::CUSTOM : c10d::ProcessGroup::BackendType::GLOO;
  group->setBackend(c10::DeviceType::CPU, type, backend);
  group->setDefaultBackend(type);
  group->setGroupName(name);
  // A rank that ends its body at once must not close what others are still connecting to.
  own_store->add("made", 1);
  while (own_store->add("made", 0) < size)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return group;
}

Group make_group(const StorePtr& store, const std::string& name, int rank, int size,
                 std::chrono::milliseconds timeout, bool disguise) {
  return {make_process_group(store, name, rank, size, timeout, disguise), name, rank, size};
}

SharedMesh make_mesh(const layout::Mesh& mesh, const StorePtr& store, int rank,
                     std::chrono::milliseconds timeout) {
  const int replicate = rank / mesh.num_shards;
  const int shard = rank % mesh.num_shards;
  const auto along = [&](const std::string& name, bool has_down) {
    const std::string row = name + "row" + std::to_string(replicate);
    const std::string column = name + "column" + std::to_string(shard);
    const int num_nodes = mesh.num_replicates;
    ProcessGroupPtr up = make_process_group(store, column, replicate, num_nodes, timeout);
    ProcessGroupPtr down;
    if (has_down) down = make_process_group(store, column + " down", replicate, num_nodes, timeout);
    return layout::PerAxis<Group>{
        make_group(store, row, shard, mesh.num_shards, timeout),
        Group(std::move(up), column, replicate, num_nodes, c10::kCPU, {}, std::move(down))};
  };
  return {along("", true), along("host ", false),
          make_group(store, "everyone", rank, mesh.num_slots(), timeout)};
}

}  // namespace dmuon::wire
