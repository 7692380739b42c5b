#pragma once

#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dmuon::watch {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

inline constexpr std::chrono::milliseconds kTimeout{10'000};

/// Calls `body(rank, store)` on a thread for each rank; the store is theirs alone.
/// Fails the test with every rank's message if any throws.
void run_ranks(int num_ranks, const std::function<void(int, const StorePtr&)>& body);

}  // namespace dmuon::watch
