#pragma once

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
  schedule::Subject subject;
  double issued;
  double started;  ///< its dependencies had happened, and those before it on its lane were done
  double done;
};

/// The same while it may still be going on.
struct Measured {
  schedule::Kind kind{};
  schedule::Subject subject;
  wire::Instant issued, started, done;
};

/// The phase of the step in which compute waits.
enum class Phase : int { kForward, kBackward, kStep };
constexpr int kNumPhases = 3;

/// Counts how long lanes are busy and how long compute waits for them, always, by the host's clock:
/// on a device with streams, how long it took to issue operations. Keeps each operation only while
/// recording, with times of where it ran. Thread-safe, except for start() and stop() on a device.
///
///     profile.start();
///     profile.add({kind, subject, issued, started, profile.clock().now()});  // one operation
///     const std::vector<Span> spans = profile.stop();
class Profile {
 public:
  explicit Profile(c10::Device device) : clock_(device) {}

  const wire::Clock& clock() const { return clock_; }

  /// Counts waits for this phase from now on.
  void set_phase(Phase phase);

  /// Recording begins, with nothing.
  void start();

  /// Ends recording. Returns the operations since start(), once they have happened.
  std::vector<Span> stop();

  /// Adds an operation that has been done. Its lane was busy with it alone: see Lane::claim.
  void add(const Measured& operation);

  /// Seconds since construction: "<kind>_s" of each kind on a lane beside compute, "busy_<lane>_s"
  /// of each of these lanes, and "wait_<phase>_s": how long compute waited for messages.
  std::map<std::string, double> seconds() const;

 private:
  mutable std::mutex mutex_;
  wire::Clock clock_;
  bool recording_ = false;
  std::vector<Measured> operations_;
  Phase phase_ = Phase::kForward;
  core::ByEnum<Phase, double, kNumPhases> waits_{};
  schedule::PerKind<double> durations_{};
};

}  // namespace dmuon::engine
