#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dmuon/layout/mesh.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

struct Batch;

/// Bytes that a rank holds at the peak of a step, counted as docs/architecture.md, "Memory", says.
/// State and node copies are there all the time, the rest is not at its most at the same moment.
struct Memory {
  std::int64_t state = 0;      ///< of what its slot owns: its parts, and all that is not cut
  std::int64_t node_copy = 0;  ///< its column's matrices in the compute dtype
  std::int64_t buffers = 0;    ///< most of packed weights, gradients and inboxes
  std::int64_t update = 0;  ///< most of a batch's update: Newton-Schulz, and the buffers beside it

  std::int64_t total() const { return state + node_copy + std::max(buffers, update); }
  bool operator==(const Memory&) const = default;
};

/// Returns the memory of each owner. With tensor parallelism the owners of a slot share its state,
/// and each counts its part; of a matrix that is not cut, each counts all.
/// @param owner, batches  as a plan has them: in range, every matrix once.
core::PerOwner<Memory> memory(const Inventory& inventory, Mesh mesh,
                              const PerParameter<Owner>& owner, const std::vector<Batch>& batches,
                              const PlanOptions& options);

}  // namespace dmuon::plan
