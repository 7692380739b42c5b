#pragma once

#include <cstdint>

#include "dmuon/plan/mesh.h"

namespace dmuon::plan {

/// The ideal owner slot of the w-th matrix in execution order (eq:comm-layout),
/// which keeps neighbours off each other's inter-node communication group.
///
/// shard = w mod G; the replicate rotates from one block of G matrices to the
/// next. On every mesh
///   - any G consecutive matrices sit on G different columns;
///   - any R*G consecutive matrices use every slot exactly once.
///
/// @param w    >= 0, place in execution order.
/// @param mesh a valid mesh.
/// @throws InvalidArgument, naming the first bad argument.
Slot layout_slot(std::int64_t w, Mesh mesh);

}  // namespace dmuon::plan
