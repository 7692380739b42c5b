#pragma once

#include "dmuon/balance/assignment.h"
#include "dmuon/plan/mesh.h"

namespace dmuon::plan {

/// Decides which owner of an assignment is which rank of the mesh, so that each column gets its
/// share of every shape: only then can neighbours sit on different columns.
/// @return the assignment with its owners renumbered.
balance::Assignment columns_alike(const balance::Assignment& assignment, Mesh mesh);

}  // namespace dmuon::plan
