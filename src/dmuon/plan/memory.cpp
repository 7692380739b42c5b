#include "dmuon/plan/memory.h"

#include <algorithm>

#include "dmuon/plan/packed_size.h"
#include "dmuon/plan/plan.h"
#include "dmuon/plan/step_buffers.h"
#include "dmuon/plan/workspace.h"

namespace dmuon::plan {
namespace {

using Units = core::Vector<UnitIndex, std::vector<ParameterIndex>>;

core::Vector<UnitIndex, std::int64_t> elements_of(const Units& units, const Inventory& inventory) {
  core::Vector<UnitIndex, std::int64_t> elements(units.size());
  for (const UnitIndex unit : units.indices()) {
    for (const ParameterIndex w : units[unit])
      elements[unit] += packed_elements(inventory[w].num_elements());
  }
  return elements;
}

// Packed buffers of all units; and, on gloo, what a slot needs to take gradients in: the larger
// part of the two stages of a route.
class BufferSizes {
 public:
  BufferSizes(const Units& units, const Inventory& inventory, Mesh mesh,
              const PerParameter<Owner>& owner, const Options& options)
      : units_(units), inventory_(inventory), mesh_(mesh), owner_(owner), options_(options) {
    elements_ = elements_of(units, inventory);
  }

  BufferBytes of(Slot slot) const {
    BufferBytes bytes(units_.size());
    for (const UnitIndex unit : units_.indices()) {
      const auto of = [&](std::int64_t elements, int size) {
        return elements * size / mesh_.tensor_parallel;
      };
      bytes[unit] = {of(elements_[unit], options_.weight_bytes),
                     of(elements_[unit], options_.gradient_bytes),
                     of(options_.on_cpu ? inbox(unit, slot) : 0, options_.gradient_bytes)};
    }
    return bytes;
  }

 private:
  std::int64_t inbox(UnitIndex unit, Slot slot) const {
    const Shard shard(slot.value() % mesh_.num_shards);
    std::int64_t column = 0;
    std::int64_t own = 0;
    for (const ParameterIndex w : units_[unit]) {
      const std::int64_t size = packed_elements(inventory_[w].num_elements());
      if (mesh_.shard_of(owner_[w]) == shard) column += size;
      if (mesh_.slot_of(owner_[w]) == slot) own += size;
    }
    return std::max(inbox_elements(column, elements_[unit], mesh_.num_shards),
                    inbox_elements(own, column, mesh_.num_replicates));
  }

  const Units& units_;
  const Inventory& inventory_;
  Mesh mesh_;
  const PerParameter<Owner>& owner_;
  const Options& options_;
  core::Vector<UnitIndex, std::int64_t> elements_;
};

// For each batch the first unit that waits for it.
std::vector<UnitIndex> units_of(const std::vector<Batch>& batches, const Units& units,
                                int num_parameters, const std::vector<BufferEvent>& events) {
  PerParameter<UnitIndex> unit_of(num_parameters);
  for (const UnitIndex unit : units.indices()) {
    for (const ParameterIndex w : units[unit]) unit_of[w] = unit;
  }
  const auto order = update_order(events, units.size());
  std::vector<UnitIndex> first;
  for (const Batch& batch : batches) {
    const ParameterIndex w = *std::min_element(
        batch.parameters.begin(), batch.parameters.end(),
        [&](ParameterIndex a, ParameterIndex b) { return order[unit_of[a]] < order[unit_of[b]]; });
    first.push_back(unit_of[w]);
  }
  return first;
}

}  // namespace

core::PerOwner<Memory> memory(const Inventory& inventory, Mesh mesh,
                              const PerParameter<Owner>& owner, const std::vector<Batch>& batches,
                              const Options& options) {
  core::Vector<Slot, std::int64_t> slot_elements(mesh.num_slots());
  core::PerShard<std::int64_t> column_elements(mesh.num_shards);
  for (const ParameterIndex w : inventory.indices()) {
    slot_elements[mesh.slot_of(owner[w])] += inventory[w].num_elements();
    column_elements[mesh.shard_of(owner[w])] += packed_elements(inventory[w].num_elements());
  }
  const Units units = group_by_unit(inventory);
  const BufferSizes sizes(units, inventory, mesh, owner, options);
  const std::vector<BufferEvent> events =
      buffer_events(elements_of(units, inventory), mesh, options);
  // Without inboxes alike on all ranks.
  core::Vector<Slot, BufferPeaks> peaks;
  for (const Slot slot : core::Indices<Slot>(options.on_cpu ? mesh.num_slots() : 1))
    peaks.push_back(buffer_peaks(events, sizes.of(slot), /*keeps=*/options.on_cpu));
  const auto peaks_of = [&](Owner rank) -> const BufferPeaks& {
    return peaks[options.on_cpu ? mesh.slot_of(rank) : Slot(0)];
  };

  const std::int64_t copied =
      options.node_copy && mesh.num_replicates > 1 ? options.weight_bytes : 0;
  core::PerOwner<Memory> all(mesh.num_owners());
  for (const Owner rank : mesh.owners()) {
    all[rank].state = kStateBytes * slot_elements[mesh.slot_of(rank)] / mesh.tensor_parallel;
    all[rank].node_copy = copied * column_elements[mesh.shard_of(rank)] / mesh.tensor_parallel;
    all[rank].buffers = peaks_of(rank).most;
  }
  const std::vector<UnitIndex> units_of_batches =
      units_of(batches, units, inventory.size(), events);
  for (std::size_t b = 0; b < batches.size(); ++b) {
    const Batch& batch = batches[b];
    const Shape shape = inventory[batch.parameters.front()].shape();
    std::int64_t& most = all[batch.owner].update;
    most = std::max(most, peaks_of(batch.owner).at_update[units_of_batches[b]] +
                              workspace_bytes(shape, batch.parameters.size(), options));
  }
  return all;
}

}  // namespace dmuon::plan
