#include "dmuon/wire/publish.h"

#include <string>

#include "dmuon/wire/exchange.h"

namespace dmuon::wire {
namespace {

// Casts the masters that this rank owns into `target`, each to the segment `where` of its record.
void write_owned(const Owned& owned, const layout::Packing& packing,
                 layout::Segment layout::PackedParameter::*where, const PackedBuffer& target) {
  for (const layout::PackedParameter& packed : packing.parameters) {
    const at::Tensor& master = owned.master(packed.index);
    if (!master.defined()) continue;
    const layout::Segment& place = packed.*where;
    target.slice(place.begin, place.end).copy_(master.view({-1}));
  }
}

// Calls `each` with the segments of this column's part, in the node copy and in the unit's weights.
template <typename Each>
void for_column(const UnitBuffers& unit, core::Shard column, const Each& each) {
  std::int64_t begin = 0;
  for (const layout::Part* part : {&unit.packing.columns[column], &unit.packing.kept[column]}) {
    for (const layout::Segment& own : part->segments) {
      each(unit.node_copy->slice(begin, begin + own.size()),
           unit.weights.slice(own.begin, own.end));
      begin += own.size();
    }
  }
}

// Copies this column's part of the node copy into the unit's weights.
void copy_from_node(const UnitBuffers& unit, core::Shard column) {
  for_column(unit, column,
             [](const at::Tensor& copy, const at::Tensor& weights) { weights.copy_(copy); });
}

}  // namespace

Work publish_inter(SharedMesh* mesh, const Owned* owned, UnitBuffers* unit) {
  if (!unit->node_copy) unit->weights.allocate();
  return [=] {
    const layout::Packing& packing = unit->packing;
    const std::string what = "the weights of " + unit->name;
    Group& column = mesh->column();
    if (unit->node_copy) {
      write_owned(*owned, packing, &layout::PackedParameter::in_column, *unit->node_copy);
      return exchange_of(column).gather(column, unit->node_copy->flat(),
                                        packing.parts_of(mesh->shard()), what);
    }
    write_owned(*owned, packing, &layout::PackedParameter::in_unit, unit->weights);
    return exchange_of(column).gather(column, unit->weights.flat(),
                                      packing.owners_of(mesh->shard()), what);
  };
}

Work publish_intra(SharedMesh* mesh, const Owned* owned, UnitBuffers* unit) {
  unit->weights.allocate();
  return [=] {
    const layout::Packing& packing = unit->packing;
    if (unit->node_copy) copy_from_node(*unit, mesh->shard());
    if (!mesh->has_inter())
      write_owned(*owned, packing, &layout::PackedParameter::in_unit, unit->weights);
    Group& row = mesh->row();
    return exchange_of(row).gather(row, unit->weights.flat(), packing.columns.values(),
                                   "the weights of " + unit->name);
  };
}

void take_back(const SharedMesh& mesh, const Owned& owned, UnitBuffers* unit) {
  for (const layout::PackedParameter& packed : unit->packing.parameters) {
    const at::Tensor& master = owned.master(packed.index);
    if (!master.defined()) continue;
    const at::Tensor kept = master.view({-1});
    const at::Tensor now = unit->weights.slice(packed.in_unit.begin, packed.in_unit.end);
    kept.copy_(at::where(kept.to(now.scalar_type()) == now, kept, now.to(kept.scalar_type())));
  }
  if (!unit->node_copy) return;
  for_column(*unit, mesh.shard(),
             [](const at::Tensor& copy, const at::Tensor& weights) { copy.copy_(weights); });
}

}  // namespace dmuon::wire
