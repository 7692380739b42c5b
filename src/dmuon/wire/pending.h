#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace dmuon::wire {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// The works of a group that threads wait for. Another thread can end these waits. Thread-safe.
class InFlight {
 public:
  /// Sets what a thread calls when its wait has failed. Call this before any wait.
  void on_failure(std::function<void()> call) { on_failure_ = std::move(call); }

  /// Waits. Returns false if the work was given up.
  bool wait(const WorkPtr& work);

  /// Ends all waits, now and from now on. A backend that cannot abort ends them at its timeout.
  void give_up(const std::string& why);
  /// Returns the reason of give_up(), or an empty string.
  std::string given_up();

  /// Calls `abort` once, and returns its future from then on.
  std::shared_future<void> abort_once(const std::function<std::shared_future<void>()>& abort);

 private:
  std::mutex mutex_;
  std::function<void()> on_failure_ = [] {};
  std::shared_future<void> aborted_;
  std::vector<WorkPtr> works_;
  std::string given_up_;
};

/// A message in flight.
///
///   Pending message = group.broadcast(tensor, root, "the weights of 'a'");
///   message.wait();
class Pending {
 public:
  Pending() = default;
  Pending(std::vector<WorkPtr> works, std::string what, std::shared_ptr<InFlight> in_flight)
      : works_(std::move(works)), what_(std::move(what)), in_flight_(std::move(in_flight)) {}

  /// True if the message has arrived, or failed, within this time, on the host. Only for backends
  /// that allow a wait to end early: gloo's collectives, but not its send and receive.
  bool wait_for(std::chrono::milliseconds most) const;

  /// Blocks the host on a CPU backend, the current stream on a CUDA one.
  /// @throws CommError naming the message if a peer died, or did not come within the timeout.
  void wait();

 private:
  std::vector<WorkPtr> works_;
  std::string what_;
  std::shared_ptr<InFlight> in_flight_;
};

/// Waits for each in turn.
void wait_all(std::vector<Pending> messages);

/// @throws CommError naming the message, with what the backend reported.
[[noreturn]] void fail(const std::string& what, const std::exception& error);

}  // namespace dmuon::wire
