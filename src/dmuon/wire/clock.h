#pragma once

#include <c10/core/Device.h>

#include <memory>

namespace c10 {
struct Event;
}

namespace dmuon::wire {

/// When the stream that was current came by; on a CPU, when the host did.
struct Instant {
  double host = 0;                    ///< seconds of the system clock, when it was asked for
  std::shared_ptr<c10::Event> event;  ///< on a device that is timed; else null
};

/// Tells when things happen where they happen. On a device that costs an event each, so it does so
/// only from start() to stop(): before and after, instants are the host's. Its own thread only, but
/// for now() on a CPU.
class Clock {
 public:
  explicit Clock(c10::Device device) : device_(device) {}

  /// Seconds of the system clock, so that ranks of one machine agree.
  static double host_now();

  /// Instants from now on are the device's. Waits for what its current stream has been given.
  void start();
  void stop() { timing_ = false; }

  Instant now() const;

  /// Seconds of the system clock. Waits until it has happened.
  /// @param instant  since the last start(), or without an event.
  double seconds(const Instant& instant) const;

 private:
  Instant timed() const;

  c10::Device device_;
  bool timing_ = false;
  Instant base_;
};

}  // namespace dmuon::wire
