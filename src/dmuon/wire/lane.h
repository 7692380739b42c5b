#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/schedule/operation.h"

namespace dmuon::wire {

/// Something that a lane will have done. Copies share it; one made by default has happened.
class Event {
 public:
  Event() = default;

  /// Blocks the host on a CPU; makes the current stream wait on other devices.
  /// @throws what the operation threw.
  void wait() const;

  /// On a CPU: whether it has happened, or failed, within this time. Elsewhere true at once.
  bool wait_for(std::chrono::milliseconds most) const;

  /// Whether it has happened, or failed, as far as the host knows without waiting. From any thread.
  bool has_happened() const;

  struct State;

 private:
  friend class Lane;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// What a lane does for an operation.
using Work = std::function<void()>;

/// An ordered queue of communication that overlaps with compute and with other lanes: on a CPU a
/// thread that runs the operations one after the other, elsewhere a stream that they are issued to
/// at once, from the calling thread.
///
/// After an operation has failed the lane runs nothing more; every later one fails with the same
/// error, because a group whose ranks are out of step is of no use. One thread at a time may
/// enqueue. Destruction waits for what runs, except in a forked child, which has no such thread.
class Lane {
 public:
  enum class Priority { kLow, kHigh };

  /// @param name      of the thread.
  /// @param priority  of the stream.
  explicit Lane(std::string name, Priority priority = Priority::kHigh);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// Returns at once. `operation` runs when everything enqueued before, everything done on the
  /// current stream before and `after` have happened. What it waits for, as c10d's work, it must
  /// wait for by itself. Gradients are off in it.
  Event enqueue(c10::Device device, Work operation, std::vector<Event> after);

  /// Whether all that was enqueued has happened, or failed, within this time, on the host.
  bool ends_within(std::chrono::milliseconds most);

 private:
  class Worker;
  class Stream;

  std::string name_;
  Priority priority_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Stream> stream_;
};

/// The lanes of a mesh beside compute. All its engines share them, hence one order.
struct Lanes : schedule::PerQueue<Lane> {
  Lanes()
      : schedule::PerQueue<Lane>{{Lane("dmuon intra"), Lane("dmuon inter"),
                                  Lane("dmuon update", Lane::Priority::kLow)}} {}
};

}  // namespace dmuon::wire
