#include "dmuon/wire/route.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "dmuon/wire/exchange.h"

namespace dmuon::wire {
namespace {

// Adds a piece of a sum to this rank's owned gradients. The piece begins at `begin` of the column.
void accumulate(Owned* owned, const layout::Packing& packing, std::int64_t begin,
                const at::Tensor& sum, double scale) {
  const layout::Segment piece{begin, begin + sum.numel()};
  for (const layout::PackedParameter& packed : packing.parameters) {
    if (!owned->owns(packed.index)) continue;
    const layout::Segment& whole = packed.in_column;
    const layout::Segment part = overlap(piece, whole);
    if (part.size() == 0) continue;
    owned->accumulate(packed.index, part.begin - whole.begin,
                      sum.narrow(0, part.begin - begin, part.size()), scale);
  }
}

void finish_accumulation(Owned* owned, const layout::Packing& packing) {
  for (const layout::PackedParameter& packed : packing.parameters)
    owned->set_filled(packed.index, true);
}

// Consumes a piece of the node's mean of this column. Keeps it if `hold`; else adds what was held
// before, and writes the sum for stage 2.
void take_node_mean(UnitBuffers* unit, core::Shard column, std::int64_t begin,
                    const at::Tensor& values, double scale, bool hold) {
  if (!unit->partial) {
    at::Tensor mean = unit->node_mean->slice(begin, begin + values.numel());
    at::mul_out(mean, values, at::scalar_tensor(scale, at::kDouble));
    return;
  }
  const layout::Packing& packing = unit->packing;
  const layout::Segment piece{begin, begin + values.numel()};
  for (const layout::PackedIndex place : packing.parameters.indices()) {
    if (packing.parameters[place].column != column) continue;
    const layout::Segment part = overlap(piece, packing.parameters[place].in_column);
    if (part.size() == 0) continue;
    at::Tensor kept = unit->partial->slice(part.begin, part.end);
    add_scaled(kept, values.narrow(0, part.begin - begin, part.size()), scale,
               /*adds=*/unit->partial_filled[place]);
    if (!hold) unit->node_mean->slice(part.begin, part.end).copy_(kept);
  }
}

std::unique_ptr<PackedBuffer> allocated(const Owned& owned, std::int64_t num_elements,
                                        at::ScalarType dtype) {
  auto buffer = std::make_unique<PackedBuffer>(owned.pool(), num_elements, dtype);
  if (num_elements > 0) buffer->allocate();
  return buffer;
}

}  // namespace

Work route_intra(SharedMesh* mesh, Owned* owned, UnitBuffers* unit, bool hold) {
  const layout::Packing& packing = unit->packing;
  const std::int64_t own = packing.column_elements(mesh->shard());
  const at::ScalarType dtype = unit->gradients.flat().scalar_type();
  const Exchange& exchange = exchange_of(mesh->row());
  unit->inbox =
      allocated(*owned, exchange.inbox_elements(mesh->row(), packing.columns.values()), dtype);
  if (hold && !unit->partial) unit->partial = allocated(*owned, own, at::kFloat);
  if (mesh->has_inter() && !hold) unit->node_mean = allocated(*owned, own, dtype);

  return [=, &packing, &exchange] {
    const auto take = [=, &packing](std::int64_t begin, const at::Tensor& sum, double scale) {
      if (mesh->has_inter()) {
        take_node_mean(unit, mesh->shard(), begin, sum, scale, hold);
      } else {
        accumulate(owned, packing, begin, sum, scale);
      }
    };
    // This rank has computed the kept part from all of the node's tokens. It is read first, because
    // the exchange overwrites the buffer.
    std::int64_t begin = packing.columns[mesh->shard()].size();
    for (const layout::Segment& kept : packing.kept[mesh->shard()].segments) {
      take(begin, unit->gradients.slice(kept.begin, kept.end), 1.0 / mesh->row().size());
      begin += kept.size();
    }
    return [=, &packing,
            rest = exchange.reduce(mesh->row(), unit->gradients.flat(), packing.columns.values(),
                                   unit->inbox->flat(), take, "the gradients of " + unit->name)] {
      rest();
      if (mesh->has_inter()) {
        std::fill(unit->partial_filled.begin(), unit->partial_filled.end(), hold);
      } else {
        finish_accumulation(owned, packing);
      }
    };
  };
}

Work route_inter(SharedMesh* mesh, Owned* owned, UnitBuffers* unit) {
  const Exchange& exchange = exchange_of(mesh->column());
  const std::vector<layout::Part> parts = unit->packing.parts_of(mesh->shard());
  unit->node_inbox = allocated(*owned, exchange.inbox_elements(mesh->column(), parts),
                               unit->node_mean->flat().scalar_type());
  return [=, &exchange] {
    const layout::Packing& packing = unit->packing;
    const auto take = [=, &packing, own = parts[static_cast<std::size_t>(mesh->column().rank())]](
                          std::int64_t begin, const at::Tensor& sum, double scale) {
      accumulate(owned, packing, own.element_at(begin), sum, scale);
    };
    return
        [=, &packing,
         rest = exchange.reduce(mesh->column(), unit->node_mean->flat(), parts,
                                unit->node_inbox->flat(), take, "the gradients of " + unit->name)] {
          rest();
          finish_accumulation(owned, packing);
        };
  };
}

void finish_route_intra(UnitBuffers* unit) {
  unit->gradients.release();
  unit->inbox.reset();
  if (unit->node_mean) unit->partial.reset();  // which has been added to it
}

void finish_route_inter(UnitBuffers* unit) {
  unit->node_mean.reset();
  unit->node_inbox.reset();
}

}  // namespace dmuon::wire
