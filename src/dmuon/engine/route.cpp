#include "dmuon/engine/route.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <memory>
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

// Adds a piece of a sum, whose first element is `begin` of the column, to what this rank owns.
void accumulate(Owned* owned, const Packing& packing, std::int64_t begin, const at::Tensor& sum,
                double scale) {
  const Segment piece{begin, begin + sum.numel()};
  for (const PackedIndex place : packing.parameters.indices()) {
    const core::ParameterIndex parameter = packing.parameters[place];
    if (!owned->owns(parameter)) continue;
    const Segment whole = packing.in_column[place];
    const Segment part = overlap(piece, whole);
    if (part.size() == 0) continue;
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
void take_node_mean(UnitState* state, core::Shard column, std::int64_t begin,
                    const at::Tensor& values, double scale, bool hold) {
  if (!state->partial) {
    at::Tensor mean = state->node_mean->slice(begin, begin + values.numel());
    at::mul_out(mean, values, at::scalar_tensor(scale, at::kDouble));
    return;
  }
  const Packing& packing = state->packing();
  const Segment piece{begin, begin + values.numel()};
  for (const PackedIndex place : packing.parameters.indices()) {
    if (packing.column_of[place] != column) continue;
    const Segment part = overlap(piece, packing.in_column[place]);
    if (part.size() == 0) continue;
    at::Tensor kept = state->partial->slice(part.begin, part.end);
    add_scaled(kept, values.narrow(0, part.begin - begin, part.size()), scale,
               /*adds=*/state->partial_filled[place]);
    if (!hold) state->node_mean->slice(part.begin, part.end).copy_(kept);
  }
}

std::unique_ptr<PackedBuffer> allocated(const Owned& owned, std::int64_t num_elements,
                                        at::ScalarType dtype) {
  auto buffer = std::make_unique<PackedBuffer>(owned.pool(), num_elements, dtype);
  if (num_elements > 0) buffer->allocate();
  return buffer;
}

}  // namespace

Work route_intra(SharedMesh* mesh, Owned* owned, UnitState* state, bool hold) {
  Unit& unit = *state->unit;
  const Packing& packing = state->packing();
  unit.fill_missing_gradients();
  for (const PackedIndex place : packing.parameters.indices()) {
    if (unit.arrived(packing.leaf_of[place])) state->has_gradient[place] = true;
  }
  unit.hand_over_gradients();
  const std::int64_t own = packing.column_elements(mesh->shard());
  const at::ScalarType dtype = unit.gradients().flat().scalar_type();
  const Exchange& exchange = exchange_of(mesh->row);
  state->inbox =
      allocated(*owned, exchange.inbox_elements(mesh->row, packing.columns.values()), dtype);
  if (hold && !state->partial) state->partial = allocated(*owned, own, at::kFloat);
  if (mesh->has_inter() && !hold) state->node_mean = allocated(*owned, own, dtype);

  return [=, &unit, &packing, &exchange] {
    const auto take = [&](std::int64_t begin, const at::Tensor& sum, double scale) {
      if (mesh->has_inter()) {
        take_node_mean(state, mesh->shard(), begin, sum, scale, hold);
      } else {
        accumulate(owned, packing, begin, sum, scale);
      }
    };
    // What is kept, this rank has computed of whatever tokens of the node there were. It comes
    // first: the exchange may leave anything in the buffer.
    std::int64_t begin = packing.columns[mesh->shard()].size();
    for (const Segment& kept : packing.kept[mesh->shard()].segments) {
      take(begin, unit.gradients().slice(kept.begin, kept.end), 1.0 / mesh->num_shards());
      begin += kept.size();
    }
    exchange.reduce(mesh->row, unit.gradients().flat(), packing.columns.values(),
                    state->inbox->flat(), take, "the gradients of " + unit.name());
    if (mesh->has_inter()) {
      std::fill(state->partial_filled.begin(), state->partial_filled.end(), hold);
    } else {
      finish_accumulation(owned, packing);
    }
  };
}

Work route_inter(SharedMesh* mesh, Owned* owned, UnitState* state) {
  const Exchange& exchange = exchange_of(mesh->column);
  const std::vector<Part> parts = state->packing().parts_of(mesh->shard());
  state->node_inbox = allocated(*owned, exchange.inbox_elements(mesh->column, parts),
                                state->node_mean->flat().scalar_type());
  return [=, &exchange] {
    const Packing& packing = state->packing();
    const Part& own = parts[static_cast<std::size_t>(mesh->column.rank())];
    exchange.reduce(
        mesh->column, state->node_mean->flat(), parts, state->node_inbox->flat(),
        [&](std::int64_t begin, const at::Tensor& sum, double scale) {
          accumulate(owned, packing, own.element_at(begin), sum, scale);
        },
        "the gradients of " + state->unit->name());
    finish_accumulation(owned, packing);
  };
}

void finish_route_intra(UnitState* state) {
  state->unit->gradients().release();
  state->inbox.reset();
}

void finish_route_inter(UnitState* state) {
  state->node_mean.reset();
  state->node_inbox.reset();
}

}  // namespace dmuon::engine
