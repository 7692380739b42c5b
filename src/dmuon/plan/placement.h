#pragma once

#include "dmuon/balance/assignment.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

/// Decides which owner of an assignment is which rank of the mesh, so that each column gets its
/// share of every shape: only then can neighbours sit on different columns.
/// @return the assignment with its owners renumbered.
balance::Assignment columns_alike(const balance::Assignment& assignment, Mesh mesh);

/// Decides which owner of the assignment is which rank, and which matrices it gets: those of a
/// unit, and of a window, fall on columns as different as the counts allow (eq:comm-layout is the
/// ideal); ranks of a column take turns, so nodes rotate.
/// @return owners. Deterministic, by counted work.
PerParameter<Owner> place(const Inventory& inventory, const ShapeGroups& groups,
                          const balance::Assignment& assignment, Mesh mesh,
                          const PlanOptions& options);

}  // namespace dmuon::plan
