#include "dmuon/plan/memory.h"

#include <algorithm>

#include "dmuon/plan/plan.h"

namespace dmuon::plan {
namespace {

// fp32 update and result, two iterates of 16 bits; in Gram space as much for the square matrices.
constexpr std::int64_t kWorkspaceBytes = 12;

std::int64_t workspace(const Parameter& matrix, std::size_t num_batch) {
  const std::int64_t side = std::min(matrix.rows, matrix.cols);
  return static_cast<std::int64_t>(num_batch) * kWorkspaceBytes *
         (matrix.num_elements() + side * side);
}

// Of all units in flight: weights, gradients and the inboxes that these pass through.
std::int64_t buffers(const Inventory& inventory, Mesh mesh, const Options& options) {
  if (mesh.num_slots() == 1) return 0;
  std::int64_t largest = 0;
  std::int64_t all = 0;
  for (const std::vector<ParameterIndex>& unit : group_by_unit(inventory)) {
    std::int64_t elements = 0;
    for (const ParameterIndex w : unit) elements += inventory[w].num_elements();
    largest = std::max(largest, elements);
    all += elements;
  }
  // As many as the largest unit, but no more than there are.
  const bool fewer = largest <= all / options.units_in_flight;
  const std::int64_t in_flight = fewer ? largest * options.units_in_flight : all;
  return in_flight * (options.weight_bytes + 2 * options.gradient_bytes) / mesh.tensor_parallel;
}

}  // namespace

core::PerOwner<Memory> memory(const Inventory& inventory, Mesh mesh,
                              const PerParameter<Owner>& owner, const std::vector<Batch>& batches,
                              const Options& options) {
  core::Vector<Slot, std::int64_t> slot_elements(mesh.num_slots());
  core::PerShard<std::int64_t> column_elements(mesh.num_shards);
  for (const ParameterIndex w : inventory.indices()) {
    slot_elements[mesh.slot_of(owner[w])] += inventory[w].num_elements();
    column_elements[mesh.shard_of(owner[w])] += inventory[w].num_elements();
  }
  const std::int64_t in_flight = buffers(inventory, mesh, options);
  const std::int64_t copied =
      options.node_copy && mesh.num_replicates > 1 ? options.weight_bytes : 0;
  core::PerOwner<Memory> all(mesh.num_owners());
  for (const Owner rank : mesh.owners()) {
    all[rank].state = kStateBytes * slot_elements[mesh.slot_of(rank)] / mesh.tensor_parallel;
    all[rank].node_copy = copied * column_elements[mesh.shard_of(rank)] / mesh.tensor_parallel;
    all[rank].buffers = in_flight;
  }
  for (const Batch& batch : batches) {
    std::int64_t& largest = all[batch.owner].workspace;
    largest =
        std::max(largest, workspace(inventory[batch.parameters.front()], batch.parameters.size()));
  }
  return all;
}

}  // namespace dmuon::plan
