#pragma once

#include "dmuon/wire/owned.h"
#include "dmuon/wire/shared_mesh.h"
#include "dmuon/wire/unit_buffers.h"

namespace dmuon::wire {

// Routes gradients to their owners, averaged over all ranks (the paper, sec:design-schedule).
//
// Stage 1 averages each column's part over the G ranks of a node, at the column's member of the
// node. A rank sends (G - 1)/G of the unit, as a reduce-scatter does.
// Stage 2 averages each owner's part of a column over the R nodes, at the owner. A rank sends
// (R - 1)/R of a column's part.
//
// Between the stages the node's mean has a buffer of its own, of a column's part. So a unit's
// gradients do not wait for slow links. Under no_sync the node's mean stays at the column member,
// in fp32, and later means are added to it. The first route that is not held sends the sum.
//
// Each function allocates on the calling thread and returns the work of its lane. Arguments outlive
// that work.

/// Stage 1 for the unit's packed gradients.
/// @param hold  keeps the node's mean at the column member.
Work route_intra(SharedMesh* mesh, Owned* owned, UnitBuffers* unit, bool hold);

/// Stage 2.
Work route_inter(SharedMesh* mesh, Owned* owned, UnitBuffers* unit);

// Free the buffers of a stage, after the stage.
void finish_route_intra(UnitBuffers* unit);
void finish_route_inter(UnitBuffers* unit);

}  // namespace dmuon::wire
