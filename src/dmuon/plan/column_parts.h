#pragma once

#include "dmuon/plan/plan.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan {

/// Decides about all parameters in two steps. The strategy decides about those that any rank may
/// own. The parameters of single columns (expert parallelism) are then divided between the ranks of
/// their column, so that all have equal work, by costs whatever the strategy. Columns have equally
/// many, so the strategy ignores them. Its certificate, which does not cover all, is then dropped.
/// @param plan     has inventory, mesh, costs and options.
/// @param problem  covers all parameters.
/// @throws InvalidArgument if a parameter's column is not in the mesh.
Decision decide_with_columns(const Plan& plan, const ShapeGroups& groups,
                             const balance::Problem& problem, const Strategy& strategy);

/// Returns the least state of an owner, in bytes, for which that surely succeeds.
std::int64_t sufficient_bytes_with_columns(const Plan& plan);

}  // namespace dmuon::plan
