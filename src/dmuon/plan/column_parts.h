#pragma once

#include "dmuon/plan/plan.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan {

/// The strategy's decision about all parameters that any rank may own; then those of single columns
/// (expert parallelism) are dealt between the ranks of each, so that all have equally much to do.
/// A column has as many of them as another, so the strategy need not know of them. Its certificate,
/// which is not one of all, is left out.
/// @throws InvalidArgument where one is of no column of the mesh.
/// @param plan     has inventory, mesh, costs and options.
/// @param problem  of all parameters.
Decision decide_with_columns(const Plan& plan, const ShapeGroups& groups,
                             const balance::Problem& problem, const Strategy& strategy);

/// The least state of an owner with which that surely succeeds.
std::int64_t sufficient_bytes_with_columns(const Plan& plan);

}  // namespace dmuon::plan
