#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dmuon/engine/group.h"

namespace dmuon::engine {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

inline constexpr std::chrono::milliseconds kTimeout{10'000};

/// Calls `body(rank, store)` on a thread for each rank; the store is theirs alone.
/// Fails the test with every rank's message if any throws.
void run_ranks(int num_ranks, const std::function<void(int, const StorePtr&)>& body);

/// One rank's end of a process group over gloo; blocks until all `size` ranks have come.
/// @param name      tells groups in a store apart.
/// @param disguise  the group does not say that it is gloo, so that Group takes its general path.
ProcessGroupPtr make_process_group(const StorePtr& store, const std::string& name, int rank,
                                   int size, std::chrono::milliseconds timeout = kTimeout,
                                   bool disguise = false);

Group make_group(const StorePtr& store, const std::string& name, int rank, int size,
                 std::chrono::milliseconds timeout = kTimeout, bool disguise = false);

}  // namespace dmuon::engine
