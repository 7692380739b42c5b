#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "async_device/csrc/label.h"
#include "async_device/csrc/memory.h"
#include "async_device/csrc/schedule.h"
#include "async_device/csrc/scheduler.h"
#include "async_device/csrc/stream.h"
#include "async_device/csrc/workers.h"

namespace async_device {

/// Bytes that an operation reads or writes.
struct Use {
  Block* block;
  Region region;
  bool write;
};

/// An entry of a stream.
struct Operation {
  const std::string* name;  // interned
  std::function<void()> run;
  std::vector<Use> uses;
  LaunchPtr launch{};   // of a communication: it runs in a thread of its own
  uint64_t number = 0;  // of the launch
};

/// The accelerator: streams of entries that one thread of its own runs, in the order that the
/// settings choose. All calls except `synchronize` return at once. Safe from any thread.
class Device {
 public:
  static Device& get();
  static constexpr int kNumDevices = 8;

  Stream* default_stream(int device) { return stream(device); }
  Stream* stream(int id);
  Stream* current_stream(int device);
  /// Makes `stream` the calling thread's current one of its device. Returns the previous one.
  Stream* exchange_stream(Stream* stream);
  /// Returns a stream that no communicator has. As in CUDA's pools, a device has one for each
  /// priority, and the 33rd stream is the first.
  Stream* pool_stream(int device, bool is_high);
  /// The next stream of each pool is its first, as in a new process. Where ranks number streams
  /// differently, each runs first what others do not wait for, and a long `idle_ms` blocks all.
  void restart_pools();
  /// Returns a stream for one communicator alone, until the communicator returns it.
  Stream* take_stream(int device);
  void return_stream(Stream* stream);

  /// @throws c10::Error on a race, if these raise.
  void enqueue(Stream* stream, Operation operation);
  EventPtr record(Stream* stream);
  /// Makes later entries of `stream` run after `event`; a null event has happened.
  void wait(Stream* stream, const EventPtr& event);
  /// Answers a query of the host. A host that repeats the query until it is true will see true.
  bool query(const EventPtr& event);
  /// Call this before `has_happened`, so that a replay gives the same answers.
  void observe();
  /// For the emulation itself: the host does not learn the answer, as no GPU's host could.
  bool has_happened(const EventPtr& event);
  std::string error_of(const LaunchPtr& launch);

  /// Blocks the host; releases the GIL meanwhile.
  /// @throws c10::Error if the device failed, the awaited entry was given up, or time is over.
  void synchronize(const EventPtr& event);
  void synchronize_stream(Stream* stream) { synchronize(record(stream)); }
  void synchronize_device(int device);
  /// Waits for everything, and forgets errors.
  void reset();

  /// Notes that a GPU would block the host here. @throws c10::Error if that raises.
  void host_sync(const std::string& what);
  /// The host itself uses these bytes now. @throws c10::Error on a race, if these raise.
  void host_access(const std::string& what, const std::vector<Use>& uses);

  Block* allocate(int64_t bytes, int device);
  void free(Block* block);
  void record_stream(Block* block, Stream* stream);
  /// See Memory.
  Block* block_at(const char* address);
  ptrdiff_t host_offset();

  /// Stops all entries; every wait raises this error.
  void fail(const std::string& error);
  /// Ends the group's entries in streams; waits for them raise `error`. Then blocks while any other
  /// group's communication runs, as ncclCommAbort may.
  void abort(int64_t group, const std::string& error);
  /// Returns the age, in seconds, of the oldest communication that has not ended.
  double longest_communication_s();
  /// Describes the queues in words.
  std::string describe_queues();
  /// Waits for everything, then records steps or replays recorded ones. Streams of the pool start
  /// from the first one again.
  void record_schedule();
  void replay_schedule(Schedule::Record record);
  /// Ends a recording or a replay.
  Schedule::Record stop_schedule();
  /// Ends the device's thread; for the end of the process.
  void stop();
  void reseed();

 private:
  Device();

  void push(Stream* stream, Entry entry);
  void advance(Stream* stream);
  std::string check(Stream* stream, const Label& label, const std::vector<Use>& uses);
  /// Lets `operation` first fill blocks that it is the first to use in their new lives.
  std::string poison_stale(Stream* stream, const Label& label, Operation& operation);
  /// Reports a race between the first use of a block's new life, whatever its bytes, and a use of
  /// an earlier life.
  std::string check_reuse(Stream* stream, Label label, const Block& block);
  void report(const std::string& race);
  void raise_error(const EventPtr& event);
  std::string queues() const;

  /// Observes the device's progress for the host; a replay repeats the moment of the observation.
  void observe(std::unique_lock<std::mutex>& lock);

  /// True if a replay has steps left. If nothing can run then, they belong to another program.
  bool is_lost();

  void run();
  bool should_run() const;
  Stream* next_to_run();
  Stream* next_of_replay();
  void finish_communications();
  void start_first(Stream* stream, std::unique_lock<std::mutex>& lock);
  void start_communication(Stream* stream);
  void run_work(const std::string& name, const std::function<void()>& work);
  void finish_first(Stream* stream);

  std::mutex mutex_;
  std::condition_variable device_wakes_, host_wakes_;
  std::deque<Stream> streams_;
  struct Pool {
    std::vector<Stream*> streams;
    size_t next = 0;
  };
  Pool pools_[kNumDevices][2];  // of low and of high priority
  std::vector<Stream*> returned_;
  std::vector<EventPtr> targets_;
  Scheduler scheduler_;
  Schedule schedule_;
  Memory memory_;
  Workers workers_;
  VectorClock host_clock_;  // of all host threads together
  std::string error_;
  uint64_t sequence_ = 0;
  int64_t num_entries_ = 0;
  int64_t eager_entries_ = 0;  // that run although nobody waits
  double last_issue_ms_ = 0, last_progress_ms_ = 0;
  bool is_started_ = false, is_stopping_ = false;
};

/// Returns the calling thread's current device.
int& current_device();

/// Returns milliseconds on a clock that only rises.
double now_ms();

/// Releases the GIL, if the calling thread holds it, while it lives.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_;
};

}  // namespace async_device
