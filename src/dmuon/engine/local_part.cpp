#include "dmuon/engine/local_part.h"

#include "dmuon/core/error.h"

namespace dmuon::engine {
namespace {

using core::LeafIndex;
using core::ParameterIndex;

int rank_of(const plan::Plan& plan, ParameterIndex parameter) {
  return plan.owner.at(parameter).value() % plan.mesh.tensor_parallel;
}

layout::Parameters whole_parameters(const plan::Plan& plan) {
  layout::Parameters parameters;
  for (const ParameterIndex index : plan.inventory.indices())
    parameters.push_back({plan.inventory[index], plan.mesh.slot_of(plan.owner.at(index))});
  return parameters;
}

// [ranks][parameters of the leaf]; none if every rank has all of it.
std::vector<std::vector<layout::Slice>> slices_of(const layout::Parameters& whole,
                                                  const layout::Leaf& leaf,
                                                  const std::optional<layout::Cut>& cut,
                                                  int num_ranks) {
  std::vector<std::vector<layout::Slice>> slices;
  if (!cut) return slices;
  std::vector<layout::View> views;
  for (const ParameterIndex parameter : leaf.parameters) views.push_back(whole[parameter].view);
  for (int rank = 0; rank < num_ranks; ++rank)
    slices.push_back(layout::slices_of(leaf.sizes, views, *cut, num_ranks, rank));
  return slices;
}

}  // namespace

LocalPart local_part(const plan::Plan& plan, const layout::LeafSizes& sizes,
                     const layout::Cuts& cuts, core::Slot slot, int rank) {
  const int num_ranks = plan.mesh.tensor_parallel;
  LocalPart part{whole_parameters(plan), {}, {}, plan::batches_by_slot(plan).at(slot)};
  part.leaves = layout::leaves_of(part.parameters, sizes);
  if (num_ranks == 1) return part;
  core::invariant(cuts.size() == part.leaves.size(), "Engine: cuts: expected one for each of ",
                  part.leaves.size(), " leaves, got ", cuts.size());
  part.sliced.resize(part.parameters.size());
  layout::LeafSizes local_sizes;
  for (const LeafIndex index : part.leaves.indices()) {
    const layout::Leaf& leaf = part.leaves[index];
    const auto slices = slices_of(part.parameters, leaf, cuts[index], num_ranks);
    local_sizes.push_back(
        cuts[index] ? layout::local_sizes(leaf.sizes, *cuts[index], num_ranks, rank) : leaf.sizes);
    for (std::size_t place = 0; place < leaf.parameters.size(); ++place) {
      layout::OwnedParameter& parameter = part.parameters[leaf.parameters[place]];
      wire::SlicedParameter& sliced = part.sliced[leaf.parameters[place]];
      sliced = {parameter.view, rank_of(plan, leaf.parameters[place]), {}};
      for (const std::vector<layout::Slice>& of_rank : slices)
        sliced.slices.push_back(of_rank[place]);
      parameter.view = {sliced.num_elements(rank), 1, 1};
    }
  }
  part.leaves = layout::leaves_of(part.parameters, local_sizes);
  return part;
}

}  // namespace dmuon::engine
