#pragma once

#include "dmuon/wire/owned.h"
#include "dmuon/wire/shared_mesh.h"
#include "dmuon/wire/unit_buffers.h"

namespace dmuon::wire {

// Routing: gradients -> the node's column member (stage 1, inside the node) -> the owner (stage 2,
// between nodes), averaged: stage 1 means over the G ranks of the node, stage 2 over the R nodes.
//
// A rank sends each column's part of a unit once inside the node, and each owner's part of its own
// column once between nodes: (G - 1)/G of the unit, then (R - 1)/R of a column's part, as much as a
// reduce-scatter and a reduce-scatter. (The paper, sec:design-schedule.) Between the stages the
// node's mean has a buffer of its own, the size of a column's part, so that a unit's gradients do
// not wait for slow links. Under no_sync it stays at the column member, in fp32, and goes on with a
// later one.
//
// Each takes memory from the calling thread and returns what its lane does; arguments outlive that.

/// Stage 1 of the unit's packed gradients.
/// @param hold  the node's mean stays at the column member.
Work route_intra(SharedMesh* mesh, Owned* owned, UnitBuffers* unit, bool hold);

/// Stage 2.
Work route_inter(SharedMesh* mesh, Owned* owned, UnitBuffers* unit);

/// Free what a stage needed, once it has happened.
void finish_route_intra(UnitBuffers* unit);
void finish_route_inter(UnitBuffers* unit);

}  // namespace dmuon::wire
