#include "async_device/csrc/device.h"

#include <Python.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "async_device/csrc/cuda_kernels.h"
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
  for (int i = 0; i < kNumDevices; ++i) streams_.push_back({i, i, "default"});
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

Stream* Device::pool_stream(int device, bool is_high) {
  const std::scoped_lock lock(mutex_);
  auto& [pool, next] = pools_[device][is_high ? 1 : 0];
  const size_t turn = next++ % kPoolStreams;
  if (turn == pool.size()) {
    streams_.push_back({static_cast<int>(streams_.size()), device, is_high ? "high" : "low"});
    pool.push_back(&streams_.back());
  }
  return pool[turn];
}

void Device::restart_pools() {
  const std::scoped_lock lock(mutex_);
  for (auto& pools : pools_) {
    for (Pool& pool : pools) pool.next = 0;
  }
}

Stream* Device::take_stream(int device) {
  const std::scoped_lock lock(mutex_);
  const auto found = std::find_if(returned_.begin(), returned_.end(), [&](const Stream* stream) {
    return stream->device == device && stream->entries.empty();
  });
  if (found == returned_.end()) {
    streams_.push_back({static_cast<int>(streams_.size()), device, "private"});
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
  stream->is_used = true;
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

std::string Device::poison_stale(Stream* stream, const Label& label, Operation& operation) {
  std::string race;
  for (const Use& use : operation.uses) {
    Block* block = use.block;
    if (block->is_stale) {
      block->is_stale = false;
      std::string found = check_reuse(stream, label, *block);
      if (race.empty()) race = std::move(found);
      block->poison =
          settings().poison ? std::make_shared<Poison>(block->host, block->bytes) : nullptr;
    }
    if (block->poison && block->poison->is_filled()) block->poison.reset();
    if (!block->poison) continue;
    // Not an entry of its own: a schedule must not depend on which blocks are new.
    operation.run = [poison = block->poison, then = std::move(operation.run)] {
      poison->fill();
      then();
    };
  }
  return race;
}

std::string Device::check_reuse(Stream* stream, Label label, const Block& block) {
  if (settings().races == Races::kOff) return "";
  label.operation = interned("reuse of freed memory for " + *label.operation);
  const Region whole = make_region(0, block.bytes);
  const Access access{whole, true, stream->id, stream->clock.at(stream->id), label};
  const auto earlier = block.accesses.conflict(access, stream->clock);
  return earlier ? describe_race(*earlier, access, block.bytes) : "";
}

// A graph of dmuon's kernels would lack the operation.
void Device::enqueue(Stream* stream, Operation operation) {
  if (capture_checks.is_captured != nullptr && capture_checks.is_captured(stream) != 0)
    raise("'" + *operation.name + "' on a stream that is captured");
  const bool checks = settings().races != Races::kOff;
  const Label label{operation.name, operation.number, checks ? current_place() : 0};
  std::string race;
  {
    const std::scoped_lock lock(mutex_);
    advance(stream);
    race = poison_stale(stream, label, operation);
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

Block* Device::allocate(int64_t bytes, int device) {
  if (capture_checks.forbids != nullptr && capture_checks.forbids() != 0)
    raise("memory is allocated during a capture");
  Stream* stream = current_stream(device);
  std::unique_lock lock(mutex_);
  if (memory_.has_waiting()) {
    observe(lock);
    memory_.reclaim(host_clock_);
  }
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

Block* Device::block_at(const char* address) {
  const std::scoped_lock lock(mutex_);
  return memory_.find(address);
}

ptrdiff_t Device::host_offset() {
  const std::scoped_lock lock(mutex_);
  return memory_.host_offset();
}

void Device::reseed() {
  const std::scoped_lock lock(mutex_);
  scheduler_.seed(settings().seed);
  eager_entries_ = 0;
}

}  // namespace async_device
