#pragma once

#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "async_device/csrc/stream.h"

namespace async_device {

/// Chooses the stream whose first entry runs next, by the order of the settings. Guarded by the
/// device's lock.
class Scheduler {
 public:
  void seed(uint64_t seed);

  /// @param targets  events that the host waits for.
  /// @param is_idle  true if nothing has happened for a while.
  /// @return         null if nothing can or should run.
  Stream* pick(std::deque<Stream>& streams, const std::vector<EventPtr>& targets, bool is_idle);

  /// Returns the number of entries that the device runs now although no thread waits for it.
  int64_t eagerness();

 private:
  Stream* pick_by_issue(std::deque<Stream>& streams) const;
  Stream* pick_needed(std::deque<Stream>& streams, const std::vector<EventPtr>& targets,
                      bool is_idle) const;
  Stream* pick_at_random(std::deque<Stream>& streams);

  std::mt19937_64 random_;
  std::mt19937_64 eager_;  // of its own: how often the host calls must not change the order
  std::vector<uint64_t> priorities_;
};

}  // namespace async_device
