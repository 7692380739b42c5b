#pragma once

#include "dmuon/layout/packing.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/options.h"
#include "dmuon/schedule/operation.h"

namespace dmuon::plan {

/// An inventory's units as the engine packs them, in the order of group_by_unit().
struct PackedUnits {
  core::Vector<UnitIndex, layout::Packing> units;
  schedule::Layout layout;  ///< the same units, as the schedule sees them
};

/// Returns how often the ranks of a slot hold a parameter together: once if tensor parallelism cuts
/// it, else each of them.
inline int copies_in_slot(const Parameter& parameter, Mesh mesh) {
  return parameter.tensor_parallel ? 1 : mesh.tensor_parallel;
}

inline double elements_in_slot(const Parameter& parameter, Mesh mesh) {
  return static_cast<double>(parameter.num_elements()) * copies_in_slot(parameter, mesh);
}

/// Sizes are of all ranks of a slot together, which hold equal parts of them.
/// @param owner  in range.
PackedUnits pack_units(const Inventory& inventory, Mesh mesh, const PerParameter<Owner>& owner,
                       const PlanOptions& options);

}  // namespace dmuon::plan
