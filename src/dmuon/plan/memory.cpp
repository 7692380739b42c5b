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
  for (const std::int64_t elements : elements_of_units(inventory)) {
    largest = std::max(largest, elements);
    all += elements;
  }
  // As many as the largest unit, but no more than there are.
  const bool fewer = largest <= all / options.units_in_flight;
  const std::int64_t in_flight = fewer ? largest * options.units_in_flight : all;
  return in_flight * (options.weight_bytes + 2 * options.gradient_bytes) / mesh.tensor_parallel;
}

}  // namespace

std::vector<Memory> memory(const Inventory& inventory, Mesh mesh, const std::vector<int>& owner,
                           const std::vector<Batch>& batches, const Options& options) {
  std::vector<std::int64_t> slot_elements(static_cast<std::size_t>(mesh.num_slots()), 0);
  std::vector<std::int64_t> column_elements(static_cast<std::size_t>(mesh.num_shards), 0);
  for (std::size_t w = 0; w < inventory.size(); ++w) {
    const std::int64_t elements = inventory[w].num_elements();
    slot_elements[static_cast<std::size_t>(mesh.slot_of(owner[w]))] += elements;
    column_elements[static_cast<std::size_t>(mesh.shard_of(owner[w]))] += elements;
  }
  const std::int64_t in_flight = buffers(inventory, mesh, options);
  const bool copies = options.node_copy && mesh.num_replicates > 1;
  std::vector<Memory> all(static_cast<std::size_t>(mesh.num_owners()));
  for (int rank = 0; rank < mesh.num_owners(); ++rank) {
    Memory& one = all[static_cast<std::size_t>(rank)];
    one.state = kStateBytes * slot_elements[static_cast<std::size_t>(mesh.slot_of(rank))] /
                mesh.tensor_parallel;
    if (copies) {
      one.node_copy = options.weight_bytes *
                      column_elements[static_cast<std::size_t>(mesh.shard_of(rank))] /
                      mesh.tensor_parallel;
    }
    one.buffers = in_flight;
  }
  for (const Batch& batch : batches) {
    std::int64_t& largest = all[static_cast<std::size_t>(batch.owner)].workspace;
    const Parameter& matrix = inventory[static_cast<std::size_t>(batch.parameters.front())];
    largest = std::max(largest, workspace(matrix, batch.parameters.size()));
  }
  return all;
}

}  // namespace dmuon::plan
