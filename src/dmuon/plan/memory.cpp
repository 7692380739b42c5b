#include "dmuon/plan/memory.h"

#include <algorithm>
#include <utility>

#include "dmuon/layout/packed_size.h"
#include "dmuon/plan/packed_units.h"
#include "dmuon/plan/plan.h"
#include "dmuon/plan/state_bytes.h"
#include "dmuon/plan/step_buffers.h"
#include "dmuon/plan/workspace.h"

namespace dmuon::plan {
namespace {

// A slot's packed buffers. Only gloo has inboxes.
BufferBytes buffer_bytes(const schedule::Layout& layout, Slot slot, const PlanOptions& options) {
  BufferBytes bytes;
  for (const schedule::UnitLayout& unit : layout.units) {
    const std::int64_t all = layout.buffer_elements(unit);
    const std::int64_t travels = all - unit.kept_elements;  // inside the node
    const std::int64_t column = layout.column_elements(unit, layout.shard_of(slot));
    const std::int64_t own = unit.owner_elements[slot];
    const auto inbox = [&](std::int64_t segment, std::int64_t buffer, int group_size) {
      return options.on_cpu ? layout::inbox_elements(segment, buffer, group_size) : 0;
    };
    const auto of = [&](std::int64_t elements, int size) {
      return elements * size / layout.tensor_parallel;
    };
    bytes.push_back(
        {of(all, unit.weight_size), of(all, unit.gradient_size),
         of(inbox(column - unit.kept_elements, travels, layout.num_shards), unit.gradient_size),
         of(column, unit.gradient_size),
         of(inbox(own, column, layout.num_replicates), unit.gradient_size)});
  }
  return bytes;
}

}  // namespace

core::PerOwner<Memory> memory(const Inventory& inventory, Mesh mesh,
                              const PerParameter<Owner>& owner, const std::vector<Batch>& batches,
                              const PlanOptions& options) {
  core::Vector<Slot, std::int64_t> slot_bytes(mesh.num_slots());
  for (const ParameterIndex w : inventory.indices())
    slot_bytes[mesh.slot_of(owner[w])] +=
        copies_in_slot(inventory[w], mesh) * state_bytes(inventory[w].shape(), options.rule);
  const PackedUnits packed = pack_units(inventory, mesh, owner, options);
  const schedule::Layout& layout = packed.layout;
  core::PerShard<std::int64_t> column_elements(mesh.num_shards);
  for (const layout::Packing& packing : packed.units) {
    for (const Shard column : mesh.shards())
      column_elements[column] += packing.column_elements(column);
  }
  const std::vector<BufferEvent> events = buffer_events(layout, options, options.on_cpu);
  // Without inboxes alike on all ranks of a column.
  core::Vector<Slot, BufferPeaks> peaks;
  for (const Slot slot : core::Indices<Slot>(options.on_cpu ? mesh.num_slots() : mesh.num_shards)) {
    peaks.push_back(buffer_peaks(events, buffer_bytes(layout, slot, options),
                                 /*keeps=*/options.on_cpu));
  }
  const auto peaks_of = [&](Owner rank) -> const BufferPeaks& {
    return peaks[Slot(mesh.slot_of(rank).value() % peaks.size())];
  };

  const std::int64_t copied =
      options.node_copy && mesh.num_replicates > 1 ? options.weight_bytes : 0;
  core::PerOwner<Memory> all(mesh.num_owners());
  for (const Owner rank : mesh.owners()) {
    all[rank].state = slot_bytes[mesh.slot_of(rank)] / mesh.tensor_parallel;
    all[rank].node_copy = copied * column_elements[mesh.shard_of(rank)] / mesh.tensor_parallel;
    all[rank].buffers = peaks_of(rank).most;
  }
  for (const Batch& batch : batches) {
    const Shape shape = inventory[batch.parameters.front()].shape();
    std::int64_t& most = all[batch.owner].update;
    most = std::max(
        most, peaks_of(batch.owner).at_update +
                  workspace_bytes(shape, batch.parameters.size(), options, mesh.tensor_parallel));
  }
  return all;
}

}  // namespace dmuon::plan
