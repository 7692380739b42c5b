#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "async_device/csrc/vector_clock.h"

namespace async_device {

struct Stream;

/// A point in a stream. Guarded by the device's lock.
struct Event {
  bool is_done = false;
  double time_ms = 0;        // when it was reached
  Stream* stream = nullptr;  // that it was recorded in
  VectorClock clock{};       // what has happened when it is reached
  std::string error{};       // why what it stands for was given up; empty if it was not
};
using EventPtr = std::shared_ptr<Event>;

/// A communication in a stream. Guarded by the device's lock.
struct Launch {
  int64_t group = 0;
  bool is_over = false;
  std::string error{};  // why it was given up; empty if it was not
};
using LaunchPtr = std::shared_ptr<Launch>;

/// The next action of a stream.
struct Entry {
  enum class Kind { kRun, kCommunicate, kRecord, kWait };

  Kind kind;
  const std::string* name;      // interned
  std::function<void()> run{};  // of kRun and kCommunicate
  EventPtr event{};             // of kRecord and kWait
  LaunchPtr launch{};           // of kCommunicate
  uint64_t sequence = 0;        // order of issue, over all streams
  double begin_ms = 0;          // when it was started; kCommunicate only
};

/// Entries that happen one after the other. The device's lock guards all except the first three.
struct Stream {
  int id;
  int device;
  const char* kind;  // "default", "low" or "high" priority of the pool, or "private"
  std::deque<Entry> entries{};
  bool is_busy = false;  // its first entry runs now
  bool is_over = false;  // ... and has been run to its end, or given up
  bool is_used = false;  // something was issued to it since everything was waited for
  VectorClock clock{};   // of what has been issued to it
  std::string error{};   // of a communication that was given up; until the host has heard of it

  /// True if its first entry could be started now.
  bool can_run() const {
    if (entries.empty() || is_busy) return false;
    return entries.front().kind != Entry::Kind::kWait || entries.front().event->is_done;
  }
};

}  // namespace async_device
