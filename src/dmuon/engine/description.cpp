// An executor's units and batches as a schedule sees them; its counters, and the engine's.

#include <string>
#include <utility>
#include <vector>

#include "dmuon/engine/engine.h"

namespace dmuon::engine {

schedule::Layout Executor::layout() const {
  schedule::Layout layout{mesh_.shape(), {}};
  for (const UnitState& state : states_) {
    layout::UnitLayout& unit = layout.units.emplace_back(unit_layout(state.buffers->packing));
    unit.name = state.unit->name();
    unit.host = state.host;
    unit.weight_size = static_cast<int>(state.buffers->weights.flat().element_size());
    unit.gradient_size = static_cast<int>(state.buffers->gradients.flat().element_size());
  }
  return layout;
}

schedule::Batches Executor::units_of_batches() const {
  schedule::Batches touched;
  for (const wire::OwnedBatch& batch : owned_.batches()) {
    std::vector<core::UnitIndex> units;
    for (const core::ParameterIndex parameter : batch.parameters)
      units.push_back(part_.parameters[parameter].unit_index());
    touched.push_back(std::move(units));
  }
  return touched;
}

std::vector<at::Tensor> Executor::lasting_tensors() const {
  std::vector<at::Tensor> found;
  for (const wire::OwnedBatch& batch : owned_.batches())
    for (const auto& [name, tensor] : batch.tensors) found.push_back(tensor);
  for (const UnitState& state : states_)
    if (state.buffers->node_copy) found.push_back(state.buffers->node_copy->flat());
  return found;
}

std::map<std::string, double> Executor::statistics() const {
  std::map<std::string, double> all = profile_.seconds();
  double copies = 0;
  for (const UnitState& state : states_)
    copies += static_cast<double>(state.unit->num_gradient_copies());
  all["gradient_copies"] = copies;
  all["unshards"] = static_cast<double>(num_unshards_);
  all["routes"] = static_cast<double>(num_routes_);
  all["current_bytes"] = static_cast<double>(pool_->current_bytes());
  all["peak_bytes"] = static_cast<double>(pool_->peak_bytes());
  all["allocations"] = static_cast<double>(pool_->num_allocations());
  const auto add_traffic = [&](const std::string& of, const wire::Group& group) {
    all["messages" + of] = static_cast<double>(group.traffic().num_messages);
    all["bytes_sent" + of] = static_cast<double>(group.traffic().num_bytes);
  };
  for (const schedule::Lane lane : schedule::kQueues) {
    if (!schedule::carries_messages(lane)) continue;
    const std::string of = std::string("_") + schedule::name_of(lane);
    add_traffic(of, mesh_.along[schedule::axis_of(lane)]);
  }
  if (mesh_.tensor_parallel) add_traffic("_slices", mesh_.tensor_parallel->slices);
  return all;
}

std::map<std::string, double> Engine::statistics() const {
  std::map<std::string, double> all = executor_.statistics();
  all.insert(seconds_.begin(), seconds_.end());
  all["comparisons"] = static_cast<double>(num_compared_);
  return all;
}

}  // namespace dmuon::engine
