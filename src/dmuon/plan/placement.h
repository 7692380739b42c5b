#pragma once

#include "dmuon/balance/assignment.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

/// Gives each owner of an assignment a rank of the mesh, so that each column gets its share of
/// every shape. Only then can neighbours be on different columns. Pure function.
/// @return the assignment with its owners renumbered.
balance::Assignment columns_alike(const balance::Assignment& assignment, Mesh mesh);

/// Gives each owner of the assignment a rank and its matrices. The matrices of a unit, and of a
/// window, get columns as different as the counts allow (eq:comm-layout is the ideal). Ranks of a
/// column take turns, so nodes rotate. Pure function.
/// @return the owner of each parameter. Deterministic, by counted work.
PerParameter<Owner> place(const Inventory& inventory, const ShapeGroups& groups,
                          const balance::Assignment& assignment, Mesh mesh,
                          const PlanOptions& options);

}  // namespace dmuon::plan
