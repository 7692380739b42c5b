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

/// @param owner  in range.
PackedUnits pack_units(const Inventory& inventory, Mesh mesh, const PerParameter<Owner>& owner,
                       const PlanOptions& options);

}  // namespace dmuon::plan
