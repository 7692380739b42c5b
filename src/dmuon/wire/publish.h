#pragma once

#include "dmuon/wire/owned.h"
#include "dmuon/wire/shared_mesh.h"
#include "dmuon/wire/unit_buffers.h"

namespace dmuon::wire {

// Publishes owners' weights to all ranks (the paper, sec:design-schedule).
//
// Stage 1 sends each owner's part of a unit along the owner's column: one message an owner, log2(R)
// steps, (R - 1) x part bytes in the owner's tree. With node copies it runs once a version, without
// at every unshard.
// Stage 2 sends each column's part inside the node: one message a column, at every unshard. If
// parts are equal, a stage is one all-gather on accelerators (exchange.h).
//
// Each function allocates on the calling thread and returns the work of its lane. Arguments outlive
// that work.

/// Stage 1: fills the node copy; without one, this column's part of the weights.
Work publish_inter(SharedMesh* mesh, const Owned* owned, UnitBuffers* unit);

/// Stage 2: fills the weights.
Work publish_intra(SharedMesh* mesh, const Owned* owned, UnitBuffers* unit);

/// Writes the unit's packed weights, which a module has changed on all ranks alike, to where its
/// next publication takes them from: the masters that this rank owns, and its node copy. A master
/// keeps the bits of elements that have not changed. It runs on the current stream, in no lane.
void take_back(const SharedMesh& mesh, const Owned& owned, UnitBuffers* unit);

}  // namespace dmuon::wire
