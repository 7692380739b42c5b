#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "async_device/csrc/device.h"
#include "async_device/csrc/settings.h"

namespace async_device {

bool Device::should_run() const {
  return !targets_.empty() || eager_entries_ > 0 || num_entries_ > settings().max_queued ||
         now_ms() - last_issue_ms_ > settings().idle_ms;
}

void Device::run() {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const c10::AutoGradMode no_gradients(false);
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    finish_communications();
    if (num_entries_ == 0) {
      host_wakes_.notify_all();
      device_wakes_.wait(lock);
      continue;
    }
    Stream* stream = next_to_run();
    if (stream == nullptr) {
      const auto half = std::chrono::duration<double, std::milli>(settings().idle_ms / 2);
      device_wakes_.wait_for(lock, half);
      continue;
    }
    if (eager_entries_ > 0) --eager_entries_;
    start_first(stream, lock);
  }
}

Stream* Device::next_to_run() {
  if (schedule_.is_replaying()) return next_of_replay();
  if (!should_run()) return nullptr;
  const bool is_idle = now_ms() - last_progress_ms_ > settings().idle_ms;
  return scheduler_.pick(streams_, targets_, is_idle);
}

Stream* Device::next_of_replay() {
  if (schedule_.waits_for_observation()) {
    host_wakes_.notify_all();
    return nullptr;
  }
  const int64_t step = schedule_.next_step();
  if (step < 0 || step >= static_cast<int64_t>(streams_.size())) return nullptr;
  Stream* stream = &streams_[static_cast<size_t>(step)];
  return stream->can_run() ? stream : nullptr;
}

void Device::finish_communications() {
  for (Stream& stream : streams_) {
    if (!stream.is_over) continue;
    const int64_t step = Schedule::end_of(stream.id);
    if (schedule_.is_replaying() &&
        (schedule_.waits_for_observation() || schedule_.next_step() != step)) {
      continue;
    }
    schedule_.make_step(step);
    stream.is_over = false;
    finish_first(&stream);
    last_progress_ms_ = now_ms();
  }
}

void Device::start_first(Stream* stream, std::unique_lock<std::mutex>& lock) {
  schedule_.make_step(stream->id);
  last_progress_ms_ = now_ms();
  Entry& first = stream->entries.front();
  switch (first.kind) {
    case Entry::Kind::kRecord:
      first.event->error = stream->error;
      first.event->time_ms = last_progress_ms_;
      first.event->is_done = true;
      finish_first(stream);
      host_wakes_.notify_all();
      break;
    case Entry::Kind::kWait:
      if (!first.event->error.empty()) stream->error = first.event->error;
      finish_first(stream);
      break;
    case Entry::Kind::kRun: {
      stream->is_busy = true;
      auto work = std::move(first.run);
      const std::string* name = first.name;
      lock.unlock();
      run_work(*name, work);
      work = nullptr;  // what it holds may call back
      lock.lock();
      finish_first(stream);
      break;
    }
    case Entry::Kind::kCommunicate:
      start_communication(stream);
      break;
  }
}

void Device::start_communication(Stream* stream) {
  Entry& first = stream->entries.front();
  const LaunchPtr launch = first.launch;
  if (!launch->error.empty()) {  // given up before it began
    stream->error = launch->error;
    launch->is_over = true;
    return finish_first(stream);
  }
  stream->is_busy = true;
  first.begin_ms = last_progress_ms_;
  workers_.run([this, stream, launch, name = first.name, work = std::move(first.run)]() mutable {
    run_work(*name, work);
    work = nullptr;
    const std::scoped_lock lock(mutex_);
    if (launch->is_over) return;  // given up meanwhile
    launch->is_over = stream->is_over = true;
    device_wakes_.notify_all();
  });
}

void Device::run_work(const std::string& name, const std::function<void()>& work) {
  {
    const std::scoped_lock lock(mutex_);
    if (!error_.empty()) return;
  }
  try {
    work();
  } catch (const c10::Error& error) {
    fail("in '" + name + "': " + error.what_without_backtrace() + "; " + describe_queues());
  } catch (const std::exception& error) {
    fail("in '" + name + "': " + error.what() + "; " + describe_queues());
  }
}

void Device::finish_first(Stream* stream) {
  stream->is_busy = false;
  stream->entries.pop_front();
  --num_entries_;
}

void Device::fail(const std::string& error) {
  const std::scoped_lock lock(mutex_);
  if (error_.empty()) error_ = error;
  host_wakes_.notify_all();
}

void Device::abort(int64_t group, const std::string& error) {
  std::unique_lock lock(mutex_);
  for (Stream& stream : streams_) {
    for (Entry& entry : stream.entries) {
      if (entry.kind == Entry::Kind::kCommunicate && entry.launch->group == group) {
        entry.launch->error = error;
      }
    }
    if (!stream.is_busy || stream.entries.front().kind != Entry::Kind::kCommunicate) continue;
    const LaunchPtr launch = stream.entries.front().launch;
    if (launch->error.empty()) continue;
    launch->is_over = stream.is_over = true;
    stream.error = launch->error;
  }
  device_wakes_.notify_all();
  // A communicator's memory is freed at last, which waits for the whole device.
  const auto runs = [](const Stream& stream) {
    return stream.is_busy && stream.entries.front().kind == Entry::Kind::kCommunicate &&
           stream.entries.front().launch->error.empty();
  };
  const double end_ms = now_ms() + 1000 * settings().hang_s;
  while (!is_stopping_ && now_ms() < end_ms && std::ranges::any_of(streams_, runs)) {
    host_wakes_.wait_for(lock, std::chrono::milliseconds(10));
  }
}

double Device::longest_communication_s() {
  const std::scoped_lock lock(mutex_);
  double longest_ms = 0;
  for (const Stream& stream : streams_) {
    if (!stream.is_busy || stream.entries.front().kind != Entry::Kind::kCommunicate) continue;
    longest_ms = std::max(longest_ms, now_ms() - stream.entries.front().begin_ms);
  }
  return longest_ms / 1000;
}

std::string Device::describe_queues() {
  const std::scoped_lock lock(mutex_);
  return queues();
}

std::string Device::queues() const {
  std::string text = "queued:";
  for (const Stream& stream : streams_) {
    if (stream.entries.empty()) continue;
    const Entry& first = stream.entries.front();
    text += " [stream " + std::to_string(stream.id) + ": " + std::to_string(stream.entries.size()) +
            ", first '" + *first.name + "'";
    if (stream.is_busy) text += ", which runs";
    if (first.kind == Entry::Kind::kWait && !first.event->is_done) {
      text += " of stream " + std::to_string(first.event->stream->id);
    }
    text += "]";
  }
  return text;
}

void Device::stop() {
  const std::scoped_lock lock(mutex_);
  is_stopping_ = true;
  device_wakes_.notify_all();
}

}  // namespace async_device
