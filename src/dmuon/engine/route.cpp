// Routing: gradients -> the node's column member (stage 1, inside the node) -> the owner (stage 2,
// between nodes), averaged: stage 1 means over the G ranks of the node, stage 2 over the R nodes.
//
// A rank sends each column's part of a unit once inside the node, and each owner's part of its own
// column once between nodes: (G - 1)/G of the unit, then (R - 1)/R of a column's part, as much as a
// reduce-scatter and a reduce-scatter. (The paper, sec:design-schedule.) Under no_sync the node's
// mean stays at the column member, in fp32, and goes on with a later one.

#include <algorithm>

#include "dmuon/core/error.h"
#include "dmuon/engine/executor.h"
#include "dmuon/engine/reduce.h"

namespace dmuon::engine {

using schedule::Operation;

namespace {

// What two ranges of a packing share.
Segment overlap(const Segment& a, const Segment& b) {
  const Segment both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.end > both.begin ? both : Segment{};
}

Segment matrix_segment(const Packing& packing, const std::vector<MatrixSpec>& specs,
                       std::size_t place) {
  const std::int64_t begin = packing.offsets[place];
  const auto matrix = static_cast<std::size_t>(packing.matrices[place]);
  return {begin, begin + specs[matrix].num_elements()};
}

}  // namespace

// [replicates] each owner's part of this rank's column, counted from the column's begin.
std::vector<Segment> Executor::own_parts(const UnitState& state) const {
  const std::int64_t origin = own_column(state).begin;
  std::vector<Segment> parts;
  for (int replicate = 0; replicate < options_.num_replicates; ++replicate) {
    const auto owner = static_cast<std::size_t>(replicate * options_.num_shards + options_.shard);
    const Segment& part = state.unit->packing().owners[owner];
    parts.push_back({part.begin - origin, part.end - origin});
  }
  return parts;
}

// Adds a piece of a sum, whose first element is `begin` of the packing, to this owner's matrices.
void Executor::accumulate(const Unit& unit, std::int64_t begin, const at::Tensor& sum,
                          double scale) {
  const Packing& packing = unit.packing();
  const Segment piece{begin, begin + sum.numel()};
  for (std::size_t i = 0; i < packing.matrices.size(); ++i) {
    if (!is_owner(packing.matrices[i])) continue;
    const Segment whole = matrix_segment(packing, specs_, i);
    const Segment part = overlap(piece, whole);
    if (part.size() == 0) continue;
    const Place& place = places_[static_cast<std::size_t>(packing.matrices[i])];
    batches_[static_cast<std::size_t>(place.batch)].accumulate(
        place.index, part.begin - whole.begin, sum.narrow(0, part.begin - begin, part.size()),
        scale);
  }
}

void Executor::finish_accumulation(const Unit& unit) {
  for (const int matrix : unit.packing().matrices) {
    if (!is_owner(matrix)) continue;
    const Place& place = places_[static_cast<std::size_t>(matrix)];
    batches_[static_cast<std::size_t>(place.batch)].filled[place.index] = true;
  }
}

// A piece of the node's mean of this column: kept where it is held, else made ready for stage 2
// with what was held before.
void Executor::take_node_mean(UnitState& state, std::int64_t begin, at::Tensor mean, bool hold) {
  const Packing& packing = state.unit->packing();
  const std::int64_t origin = own_column(state).begin;
  const Segment piece{origin + begin, origin + begin + mean.numel()};
  for (std::size_t i = 0; state.partial && i < packing.matrices.size(); ++i) {
    const Segment part = overlap(piece, matrix_segment(packing, specs_, i));
    if (part.size() == 0) continue;
    at::Tensor values = mean.narrow(0, part.begin - piece.begin, part.size());
    at::Tensor kept = state.partial->slice(part.begin - origin, part.end - origin);
    if (state.partial_filled[i]) values.add_(kept);
    if (hold) kept.copy_(values);
  }
  if (!hold) state.unit->gradients().slice(piece.begin, piece.end).copy_(mean);
}

void Executor::route_intra(UnitState& state, const Operation& operation) {
  ++num_routes_;
  Unit& unit = *state.unit;
  unit.fill_missing_gradients();
  for (std::size_t i = 0; i < unit.packing().matrices.size(); ++i) {
    if (unit.arrived(i)) has_gradient_[static_cast<std::size_t>(unit.packing().matrices[i])] = true;
  }
  unit.hand_over_gradients();
  const bool hold = operation.hold;
  if (hold && !state.partial) {
    state.partial = std::make_unique<PackedBuffer>(pool_, own_column(state).size(), at::kFloat);
    state.partial->allocate();
  }
  // One inbox for both stages.
  const std::int64_t needed = std::max(
      inbox_elements(groups_.row, unit.packing().columns),
      has_inter() && !hold ? inbox_elements(groups_.column, own_parts(state)) : std::int64_t{0});
  state.inbox =
      std::make_unique<PackedBuffer>(pool_, needed, unit.gradients().flat().scalar_type());
  if (needed > 0) state.inbox->allocate();

  const double node_mean = 1.0 / options_.num_shards;
  enqueue(operation, [this, &state, &unit, hold, node_mean] {
    const std::int64_t origin = own_column(state).begin;
    const std::int64_t inbox = inbox_elements(groups_.row, unit.packing().columns);
    reduce_segments(
        groups_.row, unit.gradients().flat(), unit.packing().columns,
        state.inbox->flat().narrow(0, 0, inbox),
        [&](std::int64_t begin, at::Tensor sum) {
          if (has_inter()) {
            take_node_mean(state, begin, sum.mul_(node_mean), hold);
          } else {
            accumulate(unit, origin + begin, sum, node_mean);
          }
        },
        "the gradients of " + unit.name());
    if (!has_inter()) finish_accumulation(unit);
    if (has_inter()) std::fill(state.partial_filled.begin(), state.partial_filled.end(), hold);
  });
}

void Executor::route_inter(UnitState& state, const Operation& operation) {
  enqueue(operation, [this, &state, &unit = *state.unit] {
    const Segment own = own_column(state);
    const std::vector<Segment> parts = own_parts(state);
    const std::int64_t origin =
        unit.packing().owners[static_cast<std::size_t>(options_.slot())].begin;
    reduce_segments(
        groups_.column, unit.gradients().slice(own.begin, own.end), parts,
        state.inbox->flat().narrow(0, 0, inbox_elements(groups_.column, parts)),
        [&](std::int64_t begin, const at::Tensor& sum) {
          accumulate(unit, origin + begin, sum, 1.0 / options_.num_replicates);
        },
        "the gradients of " + unit.name());
    finish_accumulation(unit);
  });
}

void Executor::finish_route(UnitState& state, const Operation& operation) {
  await(operation);
  state.unit->gradients().release();
  state.inbox.reset();
}

}  // namespace dmuon::engine
