// Publication: owner -> its column's members (stage 1, between nodes) -> the node (stage 2).
//
// Stage 1 sends each owner's part of a unit once along the column: one message an owner, log2(R)
// steps, and (R - 1) x part bytes leave the owner's tree. With node copies it happens once a
// version, without at every unshard. Stage 2 sends each column's part once inside the node: one
// message a column, at every unshard. (The paper, sec:design-schedule.)

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "dmuon/engine/stopwatch.h"

namespace dmuon::engine {

// Casts this owner's matrices into its part of `target`, whose first element is `origin` of the
// packing.
void Engine::write_owned(Unit& unit, const at::Tensor& target, std::int64_t origin) {
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

// Stage 1: `target` is this column's segment.
void Engine::fill_column(Unit& unit, const at::Tensor& target, std::int64_t origin) {
  write_owned(unit, target, origin);
  std::vector<Pending> pending;
  for (int replicate = 0; replicate < options_.num_replicates; ++replicate) {
    const int owner = replicate * options_.num_shards + options_.shard;
    const Segment& part = unit.packing().owners[static_cast<std::size_t>(owner)];
    pending.push_back(groups_.column.broadcast(target.narrow(0, part.begin - origin, part.size()),
                                               replicate, unit.name()));
  }
  for (Pending& operation : pending) operation.wait();
}

void Engine::unshard(Unit& unit) {
  if (unit.live()) return;
  unit.weights().allocate();
  try {
    fill(unit);
  } catch (...) {
    unit.weights().release();  // nobody may compute with half of it
    throw;
  }
}

void Engine::fill(Unit& unit) {
  c10::AutoGradMode no_grad(false);
  ++num_unshards_;
  const Segment& own = unit.packing().columns[static_cast<std::size_t>(options_.shard)];
  const at::Tensor segment = unit.weights().slice(own.begin, own.end);
  const auto index = static_cast<std::size_t>(
      std::find_if(units_.begin(), units_.end(), [&](const auto& u) { return u.get() == &unit; }) -
      units_.begin());
  {
    Stopwatch watch(seconds_["publish_inter_s"]);
    if (PackedBuffer* copy = node_copies_[index].get()) {
      if (node_versions_[index] != version_) {
        fill_column(unit, copy->flat(), own.begin);
        node_versions_[index] = version_;
      }
      segment.copy_(copy->flat());
    } else {
      fill_column(unit, segment, own.begin);
    }
  }
  Stopwatch watch(seconds_["publish_intra_s"]);
  std::vector<Pending> pending;
  for (int column = 0; column < options_.num_shards; ++column) {
    const Segment& part = unit.packing().columns[static_cast<std::size_t>(column)];
    pending.push_back(
        groups_.row.broadcast(unit.weights().slice(part.begin, part.end), column, unit.name()));
  }
  for (Pending& operation : pending) operation.wait();
}

void Engine::publish() {
  ++version_;
  for (auto& unit : units_) unit->weights().release();
}

at::Tensor Engine::collect_master(int matrix) {
  c10::AutoGradMode no_grad(false);
  const MatrixSpec& spec = specs_.at(static_cast<std::size_t>(matrix));
  at::Tensor whole = at::empty({spec.rows, spec.cols},
                               at::TensorOptions().dtype(at::kFloat).device(options_.device));
  if (is_owner(matrix)) {
    const Place& place = places_[static_cast<std::size_t>(matrix)];
    whole.copy_(batches_[static_cast<std::size_t>(place.batch)]
                    .master[static_cast<std::int64_t>(place.index)]);
  }
  const int column = spec.owner % options_.num_shards;
  if (column == options_.shard) {
    groups_.column.broadcast(whole, spec.owner / options_.num_shards, "a whole weight").wait();
  }
  groups_.row.broadcast(whole, column, "a whole weight").wait();
  return whole;
}

}  // namespace dmuon::engine
