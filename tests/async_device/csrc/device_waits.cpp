// Implements the host's waits and queries.
#include <algorithm>
#include <chrono>
#include <utility>

#include "async_device/csrc/device.h"
#include "async_device/csrc/settings.h"
#include "async_device/csrc/statistics.h"

namespace async_device {
namespace {

const std::string kLost = "the program does not follow the recorded schedule; ";

}  // namespace

bool Device::query(const EventPtr& event) {
  if (!event) return true;
  std::unique_lock lock(mutex_);
  observe(lock);
  if (event->is_done) {
    host_clock_.join(event->clock);
    return true;
  }
  ++eager_entries_;  // who polls must come to an end
  device_wakes_.notify_all();
  return !error_.empty();
}

bool Device::has_happened(const EventPtr& event) {
  const std::scoped_lock lock(mutex_);
  return event->is_done;
}

void Device::observe() {
  std::unique_lock lock(mutex_);
  observe(lock);
}

void Device::observe(std::unique_lock<std::mutex>& lock) {
  if (schedule_.is_replaying() && !schedule_.can_observe()) {
    lock.unlock();
    const WithoutGil without_gil;  // another thread of the host may have to issue something first
    lock.lock();
    const auto most = std::chrono::duration<double>(settings().hang_s);
    const bool came = host_wakes_.wait_for(
        lock, most, [this] { return schedule_.can_observe() || !error_.empty(); });
    if (!came) error_ = kLost + queues();
  }
  schedule_.make_observation();
  device_wakes_.notify_all();
}

std::string Device::error_of(const LaunchPtr& launch) {
  const std::scoped_lock lock(mutex_);
  return launch->error;
}

void Device::synchronize(const EventPtr& event) {
  if (!event) return;
  bool came = true;
  {
    const WithoutGil without_gil;
    std::unique_lock lock(mutex_);
    if (!event->is_done) {
      targets_.push_back(event);
      last_progress_ms_ = now_ms();
      device_wakes_.notify_all();
      came = host_wakes_.wait_for(lock, std::chrono::duration<double>(settings().hang_s),
                                  [&] { return event->is_done || !error_.empty(); });
      targets_.erase(std::find(targets_.begin(), targets_.end(), event));
    }
    host_clock_.join(event->clock);
  }
  if (!came && is_lost()) {
    fail(kLost + describe_queues());
  } else if (!came) {
    fail("the host waited " + std::to_string(settings().hang_s) + " s for stream " +
         std::to_string(event->stream->id) + "; " + describe_queues());
  }
  raise_error(event);
}

void Device::raise_error(const EventPtr& event) {
  std::string error;
  {
    const std::scoped_lock lock(mutex_);
    error = error_.empty() ? event->error : "the device failed: " + error_;
    if (error_.empty() && !error.empty()) {
      for (Stream& stream : streams_) stream.error.clear();  // the host has heard of it
    }
  }
  if (!error.empty()) raise(error);
}

void Device::synchronize_device(int device) {
  std::vector<Stream*> streams;
  {
    const std::scoped_lock lock(mutex_);
    for (Stream& stream : streams_) {
      if (stream.device == device && stream.is_used) streams.push_back(&stream);
    }
  }
  std::vector<EventPtr> events;
  for (Stream* stream : streams) events.push_back(record(stream));
  for (const EventPtr& event : events) synchronize(event);
}

void Device::reset() {
  const WithoutGil without_gil;
  std::unique_lock lock(mutex_);
  eager_entries_ = num_entries_;
  device_wakes_.notify_all();
  const auto most = std::chrono::duration<double>(settings().hang_s);
  host_wakes_.wait_for(lock, most, [this] { return num_entries_ == 0; });
  for (Stream& stream : streams_) {
    host_clock_.join(stream.clock);
    stream.error.clear();
    stream.is_used = false;
  }
  memory_.reclaim(host_clock_);
  eager_entries_ = 0;
  error_.clear();
}

void Device::host_sync(const std::string& what) {
  Statistics::get().count_host_sync(what);
  if (settings().syncs == Syncs::kRaise) {
    raise("a GPU would block the host here: " +
          describe(Label{interned(what), 0, current_place()}));
  }
}

void Device::host_access(const std::string& what, const std::vector<Use>& uses) {
  const Label label{interned(what), 0, current_place()};
  std::string race;
  {
    const std::scoped_lock lock(mutex_);
    race = check(nullptr, label, uses);
  }
  report(race);
}

bool Device::is_lost() {
  const std::scoped_lock lock(mutex_);
  return schedule_.is_replaying();
}

void Device::record_schedule() {
  reset();
  restart_pools();
  const std::scoped_lock lock(mutex_);
  schedule_.record();
}

void Device::replay_schedule(Schedule::Record record) {
  reset();
  restart_pools();
  const std::scoped_lock lock(mutex_);
  schedule_.replay(std::move(record));
}

Schedule::Record Device::stop_schedule() {
  const std::scoped_lock lock(mutex_);
  return schedule_.stop();
}

}  // namespace async_device
