#include "dmuon/engine/publish.h"

#include <string>

#include "dmuon/engine/exchange.h"

namespace dmuon::engine {
namespace {

// Casts what this rank owns into `target`, where `places` says.
void write_owned(const Owned& owned, const Packing& packing,
                 const core::Vector<PackedIndex, Segment>& places, const PackedBuffer& target) {
  for (const PackedIndex place : packing.parameters.indices()) {
    const at::Tensor master = owned.of(packing.parameters[place], kMaster);
    if (!master.defined()) continue;
    target.slice(places[place].begin, places[place].end).copy_(master.view({-1}));
  }
}

}  // namespace

Work publish_inter(SharedMesh* mesh, const Owned* owned, UnitState* state) {
  if (!state->node_copy) state->unit->weights().allocate();
  return [=] {
    const Packing& packing = state->packing();
    const std::string what = "the weights of " + state->unit->name();
    const Exchange& exchange = exchange_of(mesh->column);
    if (state->node_copy) {
      write_owned(*owned, packing, packing.in_column, *state->node_copy);
      exchange.gather(mesh->column, state->node_copy->flat(), packing.parts_of(mesh->shard()),
                      what);
    } else {
      write_owned(*owned, packing, packing.segments, state->unit->weights());
      exchange.gather(mesh->column, state->unit->weights().flat(), packing.owners_of(mesh->shard()),
                      what);
    }
  };
}

Work publish_intra(SharedMesh* mesh, const Owned* owned, UnitState* state) {
  state->unit->weights().allocate();
  return [=] {
    const PackedBuffer& weights = state->unit->weights();
    const Packing& packing = state->packing();
    if (state->node_copy) {
      std::int64_t begin = 0;
      for (const Part* part : {&packing.columns[mesh->shard()], &packing.kept[mesh->shard()]}) {
        for (const Segment& own : part->segments) {
          const at::Tensor copy = state->node_copy->slice(begin, begin + own.size());
          weights.slice(own.begin, own.end).copy_(copy);
          begin += own.size();
        }
      }
    }
    if (!mesh->has_inter()) write_owned(*owned, packing, packing.segments, weights);
    exchange_of(mesh->row).gather(mesh->row, weights.flat(), packing.columns.values(),
                                  "the weights of " + state->unit->name());
  };
}

}  // namespace dmuon::engine
