#pragma once

#include "dmuon/layout/slices.h"
#include "dmuon/plan/plan.h"
#include "dmuon/wire/slice_exchange.h"

namespace dmuon::engine {

/// The part of a model that a rank has. With tensor parallelism it consists of slices.
/// Publications, routes and shards move elements, so they need no more than stacks of 1 x 1
/// matrices, as many as elements. Only the update knows the matrices.
struct LocalPart {
  layout::Parameters parameters;  ///< with their slots
  layout::Leaves leaves;
  wire::SlicedParameters sliced;  ///< empty without tensor parallelism
  /// The slot's. With tensor parallelism the i-th batches of all its owners are one.
  std::vector<std::vector<core::ParameterIndex>> batches;
};

/// @param plan   of this mesh; its inventory holds whole parameters.
/// @param sizes  of whole leaves; empty: those of views.
/// @param cuts   of the leaves; empty without tensor parallelism.
/// @param rank   of the slot's tensor-parallel group.
/// @throws InvalidArgument if a cut does not fit.
LocalPart local_part(const plan::Plan& plan, const layout::LeafSizes& sizes,
                     const layout::Cuts& cuts, core::Slot slot, int rank);

}  // namespace dmuon::engine
