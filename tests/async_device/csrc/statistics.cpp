#include "async_device/csrc/statistics.h"

#include <algorithm>
#include <utility>

namespace async_device {
namespace {

constexpr size_t kMaxRaces = 1000;

}  // namespace

Statistics& Statistics::get() {
  static auto* statistics = new Statistics();  // the device thread may outlive static objects
  return *statistics;
}

void Statistics::count_kernel(const std::string& stream_kind) {
  const std::scoped_lock lock(mutex_);
  PhaseCounts& counts = counts_[phase_];
  ++counts.kernels;
  ++counts.kernels_by_stream[stream_kind];
}

void Statistics::count_launch(int64_t messages, int64_t bytes) {
  const std::scoped_lock lock(mutex_);
  PhaseCounts& counts = counts_[phase_];
  ++counts.communication_launches;
  counts.messages += messages;
  counts.bytes_sent += bytes;
}

void Statistics::count_host_sync(const std::string& what) {
  const std::scoped_lock lock(mutex_);
  ++counts_[phase_].host_syncs[what];
}

void Statistics::count_artificial_sync(const std::string& what) {
  const std::scoped_lock lock(mutex_);
  ++counts_[phase_].artificial_syncs[what];
}

void Statistics::set_live_bytes(int64_t bytes) {
  const std::scoped_lock lock(mutex_);
  live_bytes_ = bytes;
  int64_t& peak = counts_[phase_].peak_bytes;
  peak = std::max(peak, bytes);
}

void Statistics::add_race(const std::string& race) {
  const std::scoped_lock lock(mutex_);
  if (races_.size() < kMaxRaces && std::find(races_.begin(), races_.end(), race) == races_.end()) {
    races_.push_back(race);
  }
}

std::string Statistics::enter(const std::string& phase) {
  const std::scoped_lock lock(mutex_);
  std::string before = std::exchange(phase_, phase);
  int64_t& peak = counts_[phase_].peak_bytes;
  peak = std::max(peak, live_bytes_);
  return before;
}

std::map<std::string, PhaseCounts> Statistics::phases() const {
  const std::scoped_lock lock(mutex_);
  return counts_;
}

std::vector<std::string> Statistics::races() const {
  const std::scoped_lock lock(mutex_);
  return races_;
}

int64_t Statistics::live_bytes() const {
  const std::scoped_lock lock(mutex_);
  return live_bytes_;
}

void Statistics::reset() {
  const std::scoped_lock lock(mutex_);
  counts_.clear();
  races_.clear();
  counts_[phase_].peak_bytes = live_bytes_;
}

}  // namespace async_device
