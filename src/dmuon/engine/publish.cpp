// Publication: owner -> its column's members (stage 1, between nodes) -> the node (stage 2).
//
// Stage 1 sends each owner's part of a unit once along the column: one message an owner, log2(R)
// steps, and (R - 1) x part bytes leave the owner's tree. With node copies it happens once a
// version, without at every unshard. Stage 2 sends each column's part once inside the node: one
// message a column, at every unshard. (The paper, sec:design-schedule.)

#include "dmuon/core/error.h"
#include "dmuon/engine/executor.h"

namespace dmuon::engine {

using schedule::Operation;

// Casts this owner's matrices into its part of `target`, whose first element is `origin` of the
// packing.
void Executor::write_owned(const Unit& unit, const at::Tensor& target, std::int64_t origin) {
  const Packing& packing = unit.packing();
  for (std::size_t i = 0; i < packing.matrices.size(); ++i) {
    const auto matrix = static_cast<std::size_t>(packing.matrices[i]);
    if (!is_owner(packing.matrices[i])) continue;
    const Place& place = places_[matrix];
    const at::Tensor master = batches_[static_cast<std::size_t>(place.batch)]
                                  .master[static_cast<std::int64_t>(place.index)];
    target.narrow(0, packing.offsets[i] - origin, specs_[matrix].num_elements())
        .copy_(master.view({-1}));
  }
}

// Fills the node copy, or, where there is none, this column's part of the packed buffer.
void Executor::publish_inter(UnitState& state, const Operation& operation) {
  const std::int64_t origin = own_column(state).begin;
  at::Tensor target;
  if (state.node_copy) {
    target = state.node_copy->flat();
  } else {
    state.unit->weights().allocate();
    target = state.unit->weights().slice(origin, own_column(state).end);
  }
  enqueue(operation, [this, &unit = *state.unit, target, origin, parts = own_parts(state)] {
    const std::string what = "the weights of " + unit.name();
    write_owned(unit, target, origin);
    std::vector<Pending> pending;
    for (std::size_t replicate = 0; replicate < parts.size(); ++replicate) {
      const Segment& part = parts[replicate];
      pending.push_back(groups_.column.broadcast(target.narrow(0, part.begin, part.size()),
                                                 static_cast<int>(replicate), what));
    }
    for (Pending& message : pending) message.wait();
  });
}

void Executor::publish_intra(UnitState& state, const Operation& operation) {
  ++num_unshards_;
  Unit& unit = *state.unit;
  unit.weights().allocate();
  enqueue(operation, [this, &state, &unit] {
    const std::string what = "the weights of " + unit.name();
    const Segment own = own_column(state);
    const at::Tensor segment = unit.weights().slice(own.begin, own.end);
    if (state.node_copy) segment.copy_(state.node_copy->flat());
    if (!has_inter()) write_owned(unit, segment, own.begin);
    std::vector<Pending> pending;
    for (int column = 0; column < options_.num_shards; ++column) {
      const Segment& part = unit.packing().columns[static_cast<std::size_t>(column)];
      pending.push_back(
          groups_.row.broadcast(unit.weights().slice(part.begin, part.end), column, what));
    }
    for (Pending& message : pending) message.wait();
  });
}

void Executor::reshard(UnitState& state, const Operation& operation) {
  await(operation);
  state.unit->weights().release();
}

}  // namespace dmuon::engine
