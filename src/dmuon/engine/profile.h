#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "dmuon/schedule/step_schedule.h"

namespace dmuon::engine {

/// One operation as it happened, in seconds of the system clock, so that ranks of one machine
/// agree.
struct Span {
  schedule::Kind kind;
  int unit;  ///< the batch of kUpdate
  double issued;
  double started;  ///< its dependencies had happened, and its lane was free
  double done;
};

/// Where the compute lane is, for the time that it waits.
enum class Phase : int { kForward, kBackward, kStep };

/// Counts how long lanes are busy and how long compute waits for them, always; keeps each operation
/// only while recording. On a device with streams these are the host's times: when operations were
/// issued. Thread-safe.
class Profile {
 public:
  static double now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  /// What waits from now on is counted for this phase.
  void set_phase(Phase phase);

  /// Recording begins, with nothing.
  void start();

  /// What was recorded since start(); recording ends.
  std::vector<Span> stop();

  void add(const Span& span);

  /// Seconds since construction: "<kind>_s" of each kind on a lane, "busy_intra_s", "busy_inter_s",
  /// "wait_forward_s", "wait_backward_s", "wait_step_s".
  std::map<std::string, double> seconds() const;

 private:
  mutable std::mutex mutex_;
  bool recording_ = false;
  std::vector<Span> spans_;
  Phase phase_ = Phase::kForward;
  std::array<double, 3> waits_{};                        // [phases]
  std::array<double, schedule::kNumKinds> durations_{};  // [kinds]
};

}  // namespace dmuon::engine
