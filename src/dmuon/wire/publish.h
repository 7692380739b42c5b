#pragma once

#include "dmuon/wire/owned.h"
#include "dmuon/wire/shared_mesh.h"
#include "dmuon/wire/unit_buffers.h"

namespace dmuon::wire {

// Publication: owner -> its column's members (stage 1, between nodes) -> the node (stage 2).
//
// Stage 1 sends each owner's part of a unit once along the column: one message an owner, log2(R)
// steps, and (R - 1) x part bytes leave the owner's tree. With node copies it happens once a
// version, without at every unshard. Stage 2 sends each column's part once inside the node: one
// message a column, at every unshard. (The paper, sec:design-schedule.)
//
// Each takes memory from the calling thread and returns what its lane does; arguments outlive that.

/// Stage 1 fills the node copy, or, where there is none, this column's part of the weights.
Work publish_inter(SharedMesh* mesh, const Owned* owned, UnitBuffers* unit);

/// Stage 2 fills the weights.
Work publish_intra(SharedMesh* mesh, const Owned* owned, UnitBuffers* unit);

}  // namespace dmuon::wire
