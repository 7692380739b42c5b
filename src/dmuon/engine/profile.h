#pragma once

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "dmuon/schedule/step_schedule.h"
#include "dmuon/wire/clock.h"

namespace dmuon::engine {

/// One operation as it happened, in seconds of the system clock.
struct Span {
  schedule::Kind kind;
  int unit;  ///< or the batch that kUpdate updates
  double issued;
  double started;  ///< its dependencies had happened, and its lane was free
  double done;
};

/// The same while it may still be going on.
struct Measured {
  schedule::Kind kind{};
  int unit = 0;
  wire::Instant issued, started, done;
};

/// Where the compute lane is, for the time that it waits.
enum class Phase : int { kForward, kBackward, kStep };

/// Counts how long lanes are busy and how long compute waits for them, always, by the host's clock:
/// on a device with streams, how long it took to issue operations. Keeps each operation only while
/// recording, with times of where it ran. Thread-safe, but for starting and stopping on a device.
class Profile {
 public:
  explicit Profile(c10::Device device) : clock_(device) {}

  const wire::Clock& clock() const { return clock_; }

  /// What waits from now on is counted for this phase.
  void set_phase(Phase phase);

  /// Recording begins, with nothing.
  void start();

  /// What was recorded since start(), once it has happened; recording ends.
  std::vector<Span> stop();

  void add(const Measured& operation);

  /// Seconds since construction: "<kind>_s" of each kind on a lane, "busy_intra_s", "busy_inter_s",
  /// "wait_forward_s", "wait_backward_s", "wait_step_s".
  std::map<std::string, double> seconds() const;

 private:
  mutable std::mutex mutex_;
  wire::Clock clock_;
  bool recording_ = false;
  std::vector<Measured> operations_;
  Phase phase_ = Phase::kForward;
  std::array<double, 3> waits_{};                        // [phases]
  std::array<double, schedule::kNumKinds> durations_{};  // [kinds]
};

}  // namespace dmuon::engine
