#pragma once

#include <c10/core/Device.h>

#include <memory>

namespace c10 {
struct Event;
}

namespace dmuon::wire {

/// A moment: when the current stream reached the call of now(), or on a CPU, when the host did.
struct Instant {
  double host = 0;                    ///< seconds of the system clock, at the call of now()
  std::shared_ptr<c10::Event> event;  ///< on a device that is timed; else null
};

/// Takes times on a device's streams, or on the host for a CPU.
///
///   clock.start();
///   const Instant instant = clock.now();
///   const double seconds = clock.seconds(instant);
///
/// On a device each instant costs an event. So only instants between start() and stop() are the
/// device's; others are the host's. Only now() on a CPU may be called from any thread.
class Clock {
 public:
  explicit Clock(c10::Device device) : device_(device) {}

  /// Returns seconds of the system clock, so that ranks of one machine agree.
  static double host_now();

  /// Starts the device's instants. Waits for the current stream.
  void start();
  void stop() { timing_ = false; }

  Instant now() const;

  /// Returns seconds of the system clock. Waits for the instant's event.
  /// @param instant  taken since the last start(), or without an event.
  double seconds(const Instant& instant) const;

 private:
  Instant timed() const;

  c10::Device device_;
  bool timing_ = false;
  Instant base_;
};

}  // namespace dmuon::wire
