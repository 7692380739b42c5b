#include "dmuon/engine/route.h"

#include <algorithm>
#include <string>
#include <vector>

#include "dmuon/engine/exchange.h"

namespace dmuon::engine {
namespace {

// What two ranges of a packing share.
Segment overlap(const Segment& a, const Segment& b) {
  const Segment both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.end > both.begin ? both : Segment{};
}

// Adds a piece of a sum, whose first element is `begin` of the packing, to what this rank owns.
void accumulate(Owned* owned, const Packing& packing, std::int64_t begin, const at::Tensor& sum,
                double scale) {
  const Segment piece{begin, begin + sum.numel()};
  for (const PackedIndex place : packing.parameters.indices()) {
    const core::ParameterIndex parameter = packing.parameters[place];
    const Segment whole = packing.segments[place];
    const Segment part = overlap(piece, whole);
    if (part.size() == 0 || !owned->owns(parameter)) continue;
    owned->accumulate(parameter, part.begin - whole.begin,
                      sum.narrow(0, part.begin - begin, part.size()), scale);
  }
}

void finish_accumulation(Owned* owned, const Packing& packing) {
  for (const core::ParameterIndex parameter : packing.parameters)
    owned->set_filled(parameter, true);
}

// A piece of the node's mean of this column: kept where it is held, else made ready for stage 2
// with what was held before.
void take_node_mean(UnitState* state, const Segment& column, std::int64_t begin, at::Tensor values,
                    double scale, bool hold) {
  const Packing& packing = state->packing();
  const Segment piece{column.begin + begin, column.begin + begin + values.numel()};
  if (!state->partial) values.mul_(scale);
  for (const PackedIndex place : packing.parameters.indices()) {
    const Segment part = overlap(piece, packing.segments[place]);
    if (!state->partial || part.size() == 0) continue;
    const at::Tensor own = values.narrow(0, part.begin - piece.begin, part.size());
    at::Tensor kept = state->partial->slice(part.begin - column.begin, part.end - column.begin);
    add_scaled(kept, own, scale, /*adds=*/state->partial_filled[place]);
    if (!hold) own.copy_(kept);
  }
  const at::Tensor target = state->unit->gradients().slice(piece.begin, piece.end);
  if (!hold && target.const_data_ptr() != values.const_data_ptr()) target.copy_(values);
}

std::int64_t inbox_of_stage_2(const SharedMesh& mesh, const Packing& packing) {
  return exchange_of(mesh.column).inbox_elements(mesh.column, packing.parts_of(mesh.shard()));
}

}  // namespace

Work route_intra(SharedMesh* mesh, Owned* owned, UnitState* state, bool hold) {
  Unit& unit = *state->unit;
  const Packing& packing = state->packing();
  unit.fill_missing_gradients();
  for (const PackedIndex place : packing.parameters.indices()) {
    if (unit.arrived(place)) state->has_gradient[place] = true;
  }
  unit.hand_over_gradients();
  const Segment own = packing.columns[mesh->shard()];
  if (hold && !state->partial) {
    state->partial = std::make_unique<PackedBuffer>(owned->pool(), own.size(), at::kFloat);
    state->partial->allocate();
  }
  // One inbox for both stages.
  const Exchange& exchange = exchange_of(mesh->row);
  const std::int64_t inbox = exchange.inbox_elements(mesh->row, packing.columns.values());
  std::int64_t needed = inbox;
  if (mesh->has_inter() && !hold) needed = std::max(needed, inbox_of_stage_2(*mesh, packing));
  state->inbox =
      std::make_unique<PackedBuffer>(owned->pool(), needed, unit.gradients().flat().scalar_type());
  if (needed > 0) state->inbox->allocate();

  return [=, &unit, &packing, &exchange] {
    exchange.reduce(
        mesh->row, unit.gradients().flat(), packing.columns.values(),
        state->inbox->flat().narrow(0, 0, inbox),
        [&](std::int64_t begin, const at::Tensor& sum, double scale) {
          if (mesh->has_inter()) {
            take_node_mean(state, own, begin, sum, scale, hold);
          } else {
            accumulate(owned, packing, own.begin + begin, sum, scale);
          }
        },
        "the gradients of " + unit.name());
    if (mesh->has_inter()) {
      std::fill(state->partial_filled.begin(), state->partial_filled.end(), hold);
    } else {
      finish_accumulation(owned, packing);
    }
  };
}

Work route_inter(SharedMesh* mesh, Owned* owned, UnitState* state) {
  return [=] {
    const Packing& packing = state->packing();
    const Segment own = packing.columns[mesh->shard()];
    const std::vector<Segment> parts = packing.parts_of(mesh->shard());
    const std::int64_t origin = packing.owners[mesh->slot()].begin;
    exchange_of(mesh->column)
        .reduce(
            mesh->column, state->unit->gradients().slice(own.begin, own.end), parts,
            state->inbox->flat().narrow(0, 0, inbox_of_stage_2(*mesh, packing)),
            [&](std::int64_t begin, const at::Tensor& sum, double scale) {
              accumulate(owned, packing, origin + begin, sum, scale);
            },
            "the gradients of " + state->unit->name());
    finish_accumulation(owned, packing);
  };
}

void finish_route(UnitState* state) {
  state->unit->gradients().release();
  state->inbox.reset();
}

}  // namespace dmuon::engine
