#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace async_device {

/// Records the device's steps so that it can repeat them. If the host's program is the same, a
/// replay is exact, down to addresses. Guarded by the device's lock.
///
/// A step starts the first entry of a stream, or ends a stream's communication. The host sees the
/// device's progress only where it waits, which is the same in any order, and in observations:
/// queries of events and blocks that come back from `record_stream`. In a replay an observation
/// waits for the step that it was made after, and the device stops there until it is made.
class Schedule {
 public:
  struct Record {
    std::vector<int64_t> steps;         // a stream's id, or its complement for an end
    std::vector<int64_t> observations;  // how many steps had been made at each
  };

  static int64_t end_of(int stream) { return ~static_cast<int64_t>(stream); }

  void record();
  void replay(Record record);
  /// Ends recording and replay. Returns the recorded steps.
  Record stop();

  bool is_recording() const { return mode_ == Mode::kRecord; }
  /// False after the last step.
  bool is_replaying() const {
    return mode_ == Mode::kReplay && num_steps_ < static_cast<int64_t>(record_.steps.size());
  }

  /// In a replay: returns the next step.
  int64_t next_step() const { return record_.steps[static_cast<size_t>(num_steps_)]; }
  /// In a replay: true if an observation must be made before the next step.
  bool waits_for_observation() const;
  /// In a replay: true if the next observation can be made.
  bool can_observe() const;

  int64_t num_steps() const { return num_steps_; }
  void make_step(int64_t step);
  void make_observation();

 private:
  enum class Mode { kOff, kRecord, kReplay };

  Mode mode_ = Mode::kOff;
  Record record_{};
  int64_t num_steps_ = 0;
  size_t num_observations_ = 0;
};

}  // namespace async_device
