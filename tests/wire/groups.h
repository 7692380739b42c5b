#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "dmuon/wire/group.h"
#include "dmuon/wire/shared_mesh.h"
#include "tests/watch/rank_threads.h"

namespace dmuon::wire {

using watch::kTimeout;
using watch::run_ranks;
using watch::StorePtr;
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// One rank's end of a process group over gloo; blocks until all `size` ranks have come. Null for
/// one rank alone, which needs none.
/// @param name      tells groups in a store apart.
/// @param disguise  the group does not say that it is gloo, so that Group takes its general path.
ProcessGroupPtr make_process_group(const StorePtr& store, const std::string& name, int rank,
                                   int size, std::chrono::milliseconds timeout = kTimeout,
                                   bool disguise = false);

Group make_group(const StorePtr& store, const std::string& name, int rank, int size,
                 std::chrono::milliseconds timeout = kTimeout, bool disguise = false);

/// One rank's groups; blocks until all ranks have come.
SharedMesh make_mesh(const layout::Mesh& mesh, const StorePtr& store, int rank,
                     std::chrono::milliseconds timeout = kTimeout);

}  // namespace dmuon::wire
