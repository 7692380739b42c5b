#pragma once

#include <cstdint>
#include <string>

namespace async_device {

/// The order in which the device runs entries that events do not order.
enum class Order {
  kComputeFirst,  // only what somebody waits for; side streams as late as possible
  kSideFirst,     // the youngest stream that can run
  kRandom,        // by priorities of streams, which change at random
  kIssueOrder     // as issued by the host: one hardware queue
};

/// The reaction to two accesses that are not ordered.
enum class Races { kRaise, kRecord, kOff };

/// The reaction to a call that would block a GPU's host.
enum class Syncs { kCount, kRaise };

struct Settings {
  Order order = Order::kRandom;
  uint64_t seed = 0;
  Races races = Races::kRecord;
  Syncs syncs = Syncs::kCount;
  bool poison = true;          // freed memory is filled with NaN before its next use
  double idle_ms = 2;          // the device starts by itself after as much time without a call
  int64_t max_queued = 20000;  // ... or when so many entries wait
  double stall_s = 1;          // a communication that takes longer is looked into
  double hang_s = 120;         // longest wait of the host
};

/// The process's settings. Changed only while nothing is queued.
Settings& settings();

/// @throws c10::Error with this message and the order, seed and rank that repeat the run.
[[noreturn]] void raise(const std::string& message);

/// "order 'random', seed 3, rank 0", as the end of a message.
std::string repeat_note();

}  // namespace async_device
