#pragma once

#include <cstdint>

#include "dmuon/plan/inventory.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

/// Bytes that optim::muon_update takes at once beside state, of a batch of this shape: as
/// newton_schulz::aten_products() does it, on any accelerator. On CPUs an estimate. With tensor
/// parallelism over several ranks also what optim::SliceUpdate exchanges.
std::int64_t workspace_bytes(const Shape& shape, std::size_t num_batch, const PlanOptions& options,
                             int tensor_parallel = 1);

}  // namespace dmuon::plan
