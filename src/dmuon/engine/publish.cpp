#include "dmuon/engine/publish.h"

#include <string>
#include <vector>

#include "dmuon/engine/exchange.h"

namespace dmuon::engine {
namespace {

// Casts what this rank owns into its part of `target`, whose first element is `origin` of the
// packing.
void write_owned(const Owned& owned, const Packing& packing, const at::Tensor& target,
                 std::int64_t origin) {
  for (const PackedIndex place : packing.parameters.indices()) {
    const at::Tensor master = owned.of(packing.parameters[place], kMaster);
    if (!master.defined()) continue;
    const Segment part = packing.segments[place];
    target.narrow(0, part.begin - origin, part.size()).copy_(master.view({-1}));
  }
}

}  // namespace

Work publish_inter(SharedMesh* mesh, const Owned* owned, UnitState* state) {
  const Segment own = state->packing().columns[mesh->shard()];
  at::Tensor target;
  if (state->node_copy) {
    target = state->node_copy->flat();
  } else {
    state->unit->weights().allocate();
    target = state->unit->weights().slice(own.begin, own.end);
  }
  return [=] {
    write_owned(*owned, state->packing(), target, own.begin);
    exchange_of(mesh->column)
        .gather(mesh->column, target, state->packing().parts_of(mesh->shard()),
                "the weights of " + state->unit->name());
  };
}

Work publish_intra(SharedMesh* mesh, const Owned* owned, UnitState* state) {
  state->unit->weights().allocate();
  return [=] {
    const PackedBuffer& weights = state->unit->weights();
    const auto& columns = state->packing().columns;
    const Segment own = columns[mesh->shard()];
    const at::Tensor segment = weights.slice(own.begin, own.end);
    if (state->node_copy) segment.copy_(state->node_copy->flat());
    if (!mesh->has_inter()) write_owned(*owned, state->packing(), segment, own.begin);
    exchange_of(mesh->row).gather(mesh->row, weights.flat(), columns.values(),
                                  "the weights of " + state->unit->name());
  };
}

}  // namespace dmuon::engine
