#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "dmuon/wire/group.h"
#include "dmuon/wire/shared_mesh.h"

namespace dmuon::wire {

/// Waits under the mesh's Watch for messages that the calling thread has issued, outside of steps.
///
///   messages.push_back(mesh.row().broadcast(values, root, what));
///   await_arrival(&mesh, device, std::move(messages), what);
///
/// Collective: all ranks of the mesh call it in one order, with equal words, also without messages.
/// A rank has come to the operation `what` when it has issued all of its messages. So if a rank
/// raises before or between them, its peers raise within seconds, not at the group's timeout.
///
/// Blocks the host on a CPU, the current stream elsewhere. The mesh's lanes must be empty.
/// @throws CommError naming a message or the ranks that wait in vain. The groups are then given up.
void await_arrival(SharedMesh* mesh, c10::Device device, std::vector<Pending> messages,
                   const std::string& what);

}  // namespace dmuon::wire
