#include "dmuon/cli/plot_stacks.h"

#include <algorithm>
#include <numeric>

#include "dmuon/cli/plot_parts.h"
#include "dmuon/core/error.h"

namespace dmuon::cli {
namespace {

using plan::Nanoseconds;

Nanoseconds batch_ns(const plan::ShapeCosts& costs, std::size_t num_matrices) {
  for (const plan::BatchTime& batch : costs.batches) {
    if (static_cast<std::size_t>(batch.size) == num_matrices) return batch.ns;
  }
  throw core::InvalidArgument("plot: costs must have a time for a batch of " +
                              std::to_string(num_matrices) + " of " + to_string(costs.shape) +
                              "; got none");
}

// [batches] predicted time.
std::vector<Nanoseconds> times_of(const plan::Plan& plan, const plan::ShapeGroups& groups) {
  std::vector<const plan::ShapeCosts*> costs;
  for (const plan::Shape& shape : groups.shapes) {
    const auto entry = std::find_if(plan.costs.shapes.begin(), plan.costs.shapes.end(),
                                    [&](const auto& each) { return each.shape == shape; });
    core::require(entry != plan.costs.shapes.end(), "plot: costs must have an entry for ",
                  to_string(shape), "; got none");
    costs.push_back(&*entry);
  }
  std::vector<Nanoseconds> times;
  for (const plan::Batch& batch : plan.batches) {
    const int shape = groups.shape_of.at(static_cast<std::size_t>(batch.matrices.at(0)));
    times.push_back(batch_ns(*costs[static_cast<std::size_t>(shape)], batch.matrices.size()));
  }
  return times;
}

// [shapes] index into layers, the shapes with the largest total times each in one of its own.
std::vector<std::size_t> layers_of(const plan::Plan& plan, const plan::ShapeGroups& groups,
                                   const std::vector<Nanoseconds>& times) {
  std::vector<Nanoseconds> totals(groups.shapes.size(), 0);
  for (std::size_t b = 0; b < times.size(); ++b) {
    const auto first = static_cast<std::size_t>(plan.batches[b].matrices.front());
    totals[static_cast<std::size_t>(groups.shape_of[first])] += times[b];
  }
  std::vector<std::size_t> order(groups.shapes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return totals[a] > totals[b]; });
  std::vector<std::size_t> layer(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    layer[order[i]] = std::min(i, kMaxLayers - 1);
  }
  return layer;
}

std::vector<Layer> describe_layers(const plan::ShapeGroups& groups,
                                   const std::vector<std::size_t>& layer_of) {
  std::vector<Layer> layers(std::min(groups.shapes.size(), kMaxLayers));
  for (std::size_t s = 0; s < layer_of.size(); ++s) {
    Layer& layer = layers[layer_of[s]];
    layer.label = ++layer.num_shapes == 1
                      ? label(groups.shapes[s])
                      : "other, " + std::to_string(layer.num_shapes) + " shapes";
    layer.num_matrices += groups.num_matrices[s];
  }
  return layers;
}

}  // namespace

Stacks stacks_of(const plan::Plan& plan) {
  const plan::ShapeGroups groups = group_by_shape(plan.inventory);
  const std::vector<Nanoseconds> times = times_of(plan, groups);
  const std::vector<std::size_t> layer_of = layers_of(plan, groups, times);
  const int num_owners = plan.mesh.num_owners();
  Stacks stacks;
  stacks.owners_per_bar = (num_owners + kMaxBars - 1) / kMaxBars;
  stacks.layers = describe_layers(groups, layer_of);
  for (int first = 0; first < num_owners; first += stacks.owners_per_bar) {
    stacks.owners.push_back(
        slowest(plan, first, std::min(num_owners, first + stacks.owners_per_bar)));
  }
  stacks.segments.assign(stacks.owners.size(), std::vector<Segment>(stacks.layers.size()));
  for (std::size_t b = 0; b < times.size(); ++b) {
    const plan::Batch& batch = plan.batches[b];
    const auto bar = static_cast<std::size_t>(batch.owner / stacks.owners_per_bar);
    if (stacks.owners.at(bar) != batch.owner) continue;
    const auto first = static_cast<std::size_t>(batch.matrices.front());
    Segment& segment =
        stacks.segments[bar][layer_of[static_cast<std::size_t>(groups.shape_of[first])]];
    segment.ns += times[b];
    segment.num_matrices += static_cast<int>(batch.matrices.size());
  }
  return stacks;
}

}  // namespace dmuon::cli
