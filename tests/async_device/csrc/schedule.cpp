#include "async_device/csrc/schedule.h"

#include <utility>

namespace async_device {

void Schedule::record() {
  stop();
  mode_ = Mode::kRecord;
}

void Schedule::replay(Record record) {
  stop();
  record_ = std::move(record);
  mode_ = Mode::kReplay;
}

Schedule::Record Schedule::stop() {
  mode_ = Mode::kOff;
  num_steps_ = 0;
  num_observations_ = 0;
  return std::exchange(record_, {});
}

bool Schedule::waits_for_observation() const {
  return num_observations_ < record_.observations.size() &&
         record_.observations[num_observations_] <= num_steps_;
}

bool Schedule::can_observe() const {
  return !is_replaying() || num_observations_ >= record_.observations.size() ||
         waits_for_observation();
}

void Schedule::make_step(int64_t step) {
  if (mode_ == Mode::kOff) return;
  if (mode_ == Mode::kRecord) record_.steps.push_back(step);
  ++num_steps_;
}

void Schedule::make_observation() {
  if (mode_ == Mode::kRecord) record_.observations.push_back(num_steps_);
  ++num_observations_;
}

}  // namespace async_device
