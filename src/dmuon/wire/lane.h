#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dmuon/schedule/operation.h"

namespace dmuon::wire {

/// Happens when an operation on a lane ends. Copies share it. A default event has happened.
class Event {
 public:
  Event() = default;

  /// Blocks the host on a CPU; makes the current stream wait on other devices.
  /// @throws the operation's exception.
  void wait() const;

  /// On a CPU, true if it has happened, or failed, within this time. Elsewhere true at once.
  bool wait_for(std::chrono::milliseconds most) const;

  /// True if the host knows, without waiting, that it has happened or failed. Thread-safe.
  bool has_happened() const;

  struct State;

 private:
  friend class Lane;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// The second part of an operation. The first part has issued messages; the rest waits for them and
/// uses what came. Empty if nothing is left to do.
using Rest = std::function<void()>;

/// The body of an operation on a lane: a function that returns a Rest, or nothing.
class Work {
 public:
  template <typename Body>
  requires(!std::is_same_v<Body, Work>)
      Work(Body body) {  // NOLINT(google-explicit-constructor): callers write a lambda
    if constexpr (std::is_void_v<std::invoke_result_t<Body&>>) {
      begin_ = [body = std::move(body)]() mutable {
        body();
        return Rest();
      };
    } else {
      begin_ = std::move(body);
    }
  }

  Rest begin() const { return begin_(); }

 private:
  std::function<Rest()> begin_;
};

/// An ordered queue of operations that overlaps with compute and with other lanes.
///
///   const Event done = lane.enqueue(device, [&] { group.send(tensor, 1, "x").wait(); }, {});
///   done.wait();
///
/// On a CPU a thread begins the operations one after the other, and another thread runs their
/// rests, in the same order. So the messages of an operation are under way while those of the last
/// one still travel, and both directions of a link stay busy where their loads differ from
/// operation to operation. Elsewhere the calling thread issues operations to a stream at once, each
/// with its rest.
///
/// One thread at a time may enqueue. The destructor waits for all operations, except in a forked
/// child, which has no thread.
class Lane {
 public:
  enum class Purpose {
    /// After an operation has failed, the lane runs nothing more, and every later operation fails
    /// with the same error: a group whose ranks are out of step is useless. The lane drops what had
    /// begun without a wait. gloo's collectives may go on, so memory of messages outlives a
    /// failure; its send and receive end. A stream of high priority.
    kMessages,
    /// An operation that has failed fails those that wait for it. The current stream waits for what
    /// it has queued. A stream of the lowest priority, which compute has too.
    kCompute,
  };

  /// @param name  of the thread.
  explicit Lane(std::string name, Purpose purpose = Purpose::kMessages);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// Enqueues an operation and returns at once. The operation begins after all earlier ones have
  /// begun, after all earlier work on the current stream, and after the events `after`. Its event
  /// happens after those of all earlier ones. It must itself, or in its rest, wait for the messages
  /// that it issues. Gradients are off in it.
  Event enqueue(c10::Device device, Work operation, std::vector<Event> after);

  /// True in the thread of any lane.
  static bool is_in_thread();

  /// True in the thread of any lane, and on other devices than a CPU in the calling thread while it
  /// issues an operation of a lane of kCompute.
  static bool is_in_operation();

  /// True if all enqueued operations have happened, or failed, within this time, on the host.
  bool ends_within(std::chrono::milliseconds most);

  /// Counts the lane as busy with one operation at a time, whichever model's it is. Returns since
  /// when it was busy with this one: from `started`, but not before the last one was done.
  /// Operations come as they are done. Thread-safe.
  /// @param started, done  seconds of one clock.
  double claim(double started, double done);

 private:
  class Ends;
  class Worker;
  class Stream;

  std::string name_;
  Purpose purpose_;
  std::mutex mutex_;
  double free_since_ = 0;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Stream> stream_;
};

/// The lanes of a mesh beside compute. All engines of the mesh share them, so one order holds.
struct Lanes : schedule::PerQueue<Lane> {
  Lanes()
      : schedule::PerQueue<Lane>{{Lane("dmuon intra"), Lane("dmuon inter"), Lane("dmuon slices"),
                                  Lane("dmuon update", Lane::Purpose::kCompute)}} {}
};

}  // namespace dmuon::wire
