#include "async_device/csrc/device.h"

#include <Python.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "async_device/csrc/settings.h"
#include "async_device/csrc/statistics.h"

namespace async_device {
namespace {

constexpr size_t kPoolStreams = 32;

thread_local Stream* current_streams[Device::kNumDevices] = {};

}  // namespace

int& current_device() {
  thread_local int device = 0;
  return device;
}

double now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

WithoutGil::WithoutGil()
    : state_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

Device& Device::get() {
  static auto* device = new Device();  // its thread lives as long as the process
  return *device;
}

Device::Device() {
  for (int i = 0; i < kNumDevices; ++i) streams_.push_back({i, i});
}

Stream* Device::stream(int id) {
  const std::scoped_lock lock(mutex_);
  return &streams_.at(static_cast<size_t>(id));
}

Stream* Device::current_stream(int device) {
  Stream* stream = current_streams[device];
  return stream != nullptr ? stream : default_stream(device);
}

Stream* Device::exchange_stream(Stream* stream) {
  Stream* before = current_stream(stream->device);
  current_streams[stream->device] = stream;
  return before;
}

Stream* Device::pool_stream(int device) {
  const std::scoped_lock lock(mutex_);
  auto& pool = pool_[device];
  if (pool.size() < kPoolStreams) {
    streams_.push_back({static_cast<int>(streams_.size()), device});
    pool.push_back(&streams_.back());
    return pool.back();
  }
  return pool[next_of_pool_[device]++ % kPoolStreams];
}

Stream* Device::take_stream(int device) {
  const std::scoped_lock lock(mutex_);
  const auto found = std::find_if(returned_.begin(), returned_.end(), [&](const Stream* stream) {
    return stream->device == device && stream->entries.empty();
  });
  if (found == returned_.end()) {
    streams_.push_back({static_cast<int>(streams_.size()), device});
    return &streams_.back();
  }
  Stream* stream = *found;
  returned_.erase(found);
  return stream;
}

void Device::return_stream(Stream* stream) {
  const std::scoped_lock lock(mutex_);
  returned_.push_back(stream);
}

void Device::push(Stream* stream, Entry entry) {
  if (!is_started_) {
    is_started_ = true;
    std::thread([this] { run(); }).detach();
  }
  entry.sequence = ++sequence_;
  stream->entries.push_back(std::move(entry));
  ++num_entries_;
  last_issue_ms_ = now_ms();
  eager_entries_ += scheduler_.eagerness();
  if (num_entries_ == 1 || should_run()) device_wakes_.notify_all();
}

void Device::advance(Stream* stream) {
  stream->clock.join(host_clock_);
  stream->clock.advance(stream->id);
}

std::string Device::check(Stream* stream, const Label& label, const std::vector<Use>& uses) {
  std::string report;
  if (settings().races == Races::kOff) return report;
  const int id = stream == nullptr ? -1 : stream->id;
  const VectorClock& known = stream == nullptr ? host_clock_ : stream->clock;
  const uint64_t time = stream == nullptr ? 0 : stream->clock.at(id);
  for (const Use& use : uses) {
    if (use.region.run == 0) continue;
    const Access access{use.region, use.write, id, time, label};
    const auto earlier = use.block->accesses.add(access, known);
    if (earlier && report.empty()) report = describe_race(*earlier, access, use.block->bytes);
  }
  return report;
}

std::string Device::poison_stale(Stream* stream, const Label& label, const std::vector<Use>& uses) {
  std::string race;
  for (const Use& use : uses) {
    if (!use.block->is_stale) continue;
    use.block->is_stale = false;
    advance(stream);
    Label first = label;
    first.operation = interned("reuse of freed memory for " + *label.operation);
    const Use whole{use.block, make_region(0, use.block->bytes), true};
    std::string found = check(stream, first, {whole});
    if (race.empty()) race = std::move(found);
    if (!settings().poison) continue;
    push(stream, {Entry::Kind::kRun, first.operation, [block = use.block] {
                    std::memset(block->host, 0xFF, static_cast<size_t>(block->bytes));
                  }});
  }
  return race;
}

void Device::enqueue(Stream* stream, Operation operation) {
  const bool checks = settings().races != Races::kOff;
  const Label label{operation.name, operation.number, checks ? current_place() : 0};
  std::string race;
  {
    const std::scoped_lock lock(mutex_);
    race = poison_stale(stream, label, operation.uses);
    advance(stream);
    std::string found = check(stream, label, operation.uses);
    if (race.empty()) race = std::move(found);
    const auto kind = operation.launch ? Entry::Kind::kCommunicate : Entry::Kind::kRun;
    push(stream, {kind, operation.name, std::move(operation.run), nullptr, operation.launch});
  }
  report(race);
}

void Device::report(const std::string& race) {
  if (race.empty()) return;
  Statistics::get().add_race(race);
  if (settings().races == Races::kRaise) raise(race);
}

EventPtr Device::record(Stream* stream) {
  static const std::string* const kName = interned("record of an event");
  auto event = std::make_shared<Event>();
  const std::scoped_lock lock(mutex_);
  advance(stream);
  event->stream = stream;
  event->clock = stream->clock;
  push(stream, {Entry::Kind::kRecord, kName, nullptr, event});
  return event;
}

void Device::wait(Stream* stream, const EventPtr& event) {
  static const std::string* const kName = interned("wait for an event");
  if (!event) return;
  const std::scoped_lock lock(mutex_);
  advance(stream);
  stream->clock.join(event->clock);
  push(stream, {Entry::Kind::kWait, kName, nullptr, event});
}

bool Device::query(const EventPtr& event) {
  if (!event) return true;
  const std::scoped_lock lock(mutex_);
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
  if (!came) {
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
      if (stream.device == device) streams.push_back(&stream);
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
  }
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

Block* Device::allocate(int64_t bytes, int device) {
  Stream* stream = current_stream(device);
  const std::scoped_lock lock(mutex_);
  if (memory_.has_waiting()) memory_.reclaim(host_clock_);
  Block* block = memory_.take(bytes, stream);
  Statistics::get().set_live_bytes(memory_.live_bytes());
  return block;
}

void Device::free(Block* block) {
  std::vector<Stream*> users;
  {
    const std::scoped_lock lock(mutex_);
    users.assign(block->users.begin(), block->users.end());
  }
  std::vector<EventPtr> events;
  for (Stream* user : users) events.push_back(record(user));
  const std::scoped_lock lock(mutex_);
  memory_.give(block, std::move(events));
  Statistics::get().set_live_bytes(memory_.live_bytes());
}

void Device::record_stream(Block* block, Stream* stream) {
  const std::scoped_lock lock(mutex_);
  if (stream != block->owner) block->users.insert(stream);
}

void Device::reseed() {
  const std::scoped_lock lock(mutex_);
  scheduler_.seed(settings().seed);
  eager_entries_ = 0;
}

}  // namespace async_device
