#include "dmuon/plan/packed_units.h"

#include <vector>

namespace dmuon::plan {

PackedUnits pack_units(const Inventory& inventory, Mesh mesh, const PerParameter<Owner>& owner,
                       const PlanOptions& options) {
  const auto units = group_by_unit(inventory);
  layout::Parameters parameters;
  for (const ParameterIndex w : inventory.indices()) {
    parameters.push_back({inventory[w], mesh.slot_of(owner[w])});
    parameters[w].view.rows *= copies_in_slot(inventory[w], mesh);
  }
  for (const UnitIndex unit : units.indices()) {
    for (const ParameterIndex w : units[unit]) parameters[w].unit = unit.value();
  }
  const layout::Leaves leaves = layout::leaves_of(parameters);
  PackedUnits packed{{}, {mesh, {}}};
  for (const UnitIndex unit : units.indices()) {
    packed.units.push_back(layout::pack(parameters, leaves, unit, mesh, /*pads=*/!options.on_cpu));
    schedule::UnitLayout& made = packed.layout.units.emplace_back(unit_layout(packed.units.back()));
    made.weight_size = options.weight_bytes;
    made.gradient_size = options.gradient_bytes;
  }
  return packed;
}

}  // namespace dmuon::plan
