// Routing: gradients -> the node's column member (stage 1, inside the node) -> the owner (stage 2,
// between nodes), averaged: stage 1 means over the G ranks of the node, stage 2 over the R nodes.
//
// A rank sends each column's part of a unit once inside the node, and each owner's part of its own
// column once between nodes: (G - 1)/G of the unit, then (R - 1)/R of a column's part, as much as a
// reduce-scatter and a reduce-scatter. (The paper, sec:design-schedule.)

#include <c10/core/GradMode.h>

#include <algorithm>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "dmuon/engine/reduce.h"
#include "dmuon/engine/stopwatch.h"

namespace dmuon::engine {

// Adds this owner's matrices, out of `values`, whose first element is `origin` of the packing.
void Engine::accumulate(Unit& unit, const at::Tensor& values, std::int64_t origin, double scale) {
  const Packing& packing = unit.packing();
  for (std::size_t i = 0; i < packing.matrices.size(); ++i) {
    const auto matrix = static_cast<std::size_t>(packing.matrices[i]);
    if (!is_owner(packing.matrices[i])) continue;
    const Place& place = places_[matrix];
    batches_[static_cast<std::size_t>(place.batch)].accumulate(
        place.index, values.narrow(0, packing.offsets[i] - origin, specs_[matrix].num_elements()),
        scale);
  }
}

void Engine::put_gradient(Unit& unit, int matrix, const at::Tensor& value) {
  const std::vector<int>& matrices = unit.packing().matrices;
  const auto found = std::find(matrices.begin(), matrices.end(), matrix);
  core::invariant(found != matrices.end(), "Engine::put_gradient: matrix ", matrix, " is not in ",
                  unit.name());
  unit.put_gradient(static_cast<std::size_t>(found - matrices.begin()), value);
}

void Engine::route(Unit& unit) {
  c10::AutoGradMode no_grad(false);
  ++num_routes_;
  unit.fill_missing_gradients();
  const Packing& packing = unit.packing();
  for (std::size_t i = 0; i < packing.matrices.size(); ++i) {
    if (unit.arrived(i)) has_gradient_[static_cast<std::size_t>(packing.matrices[i])] = true;
  }
  const Segment& own = packing.columns[static_cast<std::size_t>(options_.shard)];
  SegmentSum node;
  {
    Stopwatch watch(seconds_["route_intra_s"]);
    node =
        reduce_segments(groups_.row, unit.gradients().flat(), packing.columns, pool_, unit.name());
  }
  Stopwatch watch(seconds_["route_inter_s"]);
  const double node_mean = 1.0 / options_.num_shards;
  if (options_.num_replicates == 1) {
    accumulate(unit, node.values, own.begin, node_mean);
  } else {
    // The node's mean, in the wire's dtype, goes back to where the column's gradients lay.
    at::Tensor wire = unit.gradients().slice(own.begin, own.end);
    node.values.mul_(node_mean);
    if (node.storage) wire.copy_(node.values);
    node = {};
    std::vector<Segment> parts;
    for (int replicate = 0; replicate < options_.num_replicates; ++replicate) {
      const auto owner = static_cast<std::size_t>(replicate * options_.num_shards + options_.shard);
      parts.push_back(
          {packing.owners[owner].begin - own.begin, packing.owners[owner].end - own.begin});
    }
    const SegmentSum mesh = reduce_segments(groups_.column, wire, parts, pool_, unit.name());
    accumulate(unit, mesh.values, packing.owners[static_cast<std::size_t>(slot())].begin,
               1.0 / options_.num_replicates);
  }
  unit.drop_gradients();
}

}  // namespace dmuon::engine
