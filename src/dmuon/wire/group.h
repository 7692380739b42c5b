#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "dmuon/watch/watch.h"

namespace dmuon::wire {

/// What a rank has sent, for benchmarks and tests. Bytes are payload; a broadcast counts once at
/// its root, whatever tree the backend builds.
/// Counted by the thread that sends, read by any.
struct Traffic {
  std::int64_t num_messages = 0;
  std::int64_t num_bytes = 0;
};

/// A count that one thread raises while others read it.
class Counter {
 public:
  Counter() = default;
  Counter(const Counter& other) : value_(other) {}
  Counter& operator=(const Counter& other) {
    value_ = std::int64_t{other};
    return *this;
  }
  operator std::int64_t() const { return value_; }  // NOLINT(google-explicit-constructor)
  void add(std::int64_t amount) { value_ += amount; }

 private:
  std::atomic<std::int64_t> value_{0};
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// The works of a group that somebody waits for, so that another thread can end the wait.
/// Thread-safe.
class InFlight {
 public:
  /// Waits. @returns false where it was given up.
  bool wait(const WorkPtr& work);

  /// Ends all waits, now and from now on; backends end what they can.
  void give_up(const std::string& why);
  /// Why, if it was; else empty.
  std::string given_up();

 private:
  std::mutex mutex_;
  std::vector<WorkPtr> works_;
  std::string given_up_;
};

/// An operation in flight.
class Pending {
 public:
  Pending() = default;
  Pending(std::vector<WorkPtr> works, std::string what, std::shared_ptr<InFlight> in_flight)
      : works_(std::move(works)), what_(std::move(what)), in_flight_(std::move(in_flight)) {}

  /// Whether it is over, or failed, within this time, on the host.
  bool wait_for(std::chrono::milliseconds most) const;

  /// Blocks the host on a CPU backend, the current stream on a CUDA one.
  /// @throws CommError naming the operation if a peer died, or did not come within the timeout.
  void wait();

 private:
  std::vector<WorkPtr> works_;
  std::string what_;
  std::shared_ptr<InFlight> in_flight_;
};

/// Waits for each in turn.
void wait_all(std::vector<Pending> messages);

/// One private process group and the calls that the engine makes on it. A group of one has no
/// process group and communicates nothing. Calls issue at once, on the current stream, in the
/// caller's order, which must be the same on all members. Not thread-safe.
class Group {
 public:
  /// @param name    "row", "column", ...: for messages.
  /// @param device  of what travels: a process group can have a backend for each.
  Group(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string name, int rank, int size,
        c10::DeviceType device = c10::DeviceType::CPU);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  c10::DeviceType device() const { return device_; }
  Traffic traffic() const { return {num_messages_, num_bytes_}; }

  /// Calls that block are `what`, and wait under this watch.
  void wait_under(std::shared_ptr<watch::Watch> watch, watch::Rendezvous what);

  /// Where members can leave word for each other; null for a group of one.
  c10::intrusive_ptr<c10d::Store> store() const;

  /// Ends what other threads or the device wait for; the group is of no use afterwards, every call
  /// throws and says why, and it is never freed: it would wait, as the process ends, for messages
  /// that never come. From any thread.
  void give_up(const std::string& why);

  /// Whether send and receive may be in flight in any number and direction without being grouped,
  /// as on gloo with memory of the host. NCCL serialises them by pair and may deadlock.
  bool free_point_to_point() const { return free_point_to_point_; }

  /// One message from `root`; every member but the root receives the payload once. The backend's
  /// tree of log2(size) steps; in a small group, where that is no shorter, straight from the root,
  /// where the backend allows: gloo's broadcast takes a thread more.
  Pending broadcast(at::Tensor tensor, int root, const std::string& what);

  /// What `issue` issues is one launch, where the backend can group messages, and one Pending. The
  /// same on all members.
  /// @throws CommError as the calls in it; then none of them is in flight.
  std::vector<Pending> together(const std::string& what,
                                const std::function<std::vector<Pending>()>& issue);

  /// The backend's own reduction (a sum) to `root`; contents of other members' tensors are lost.
  Pending reduce_sum(at::Tensor tensor, int root, const std::string& what);

  Pending send(at::Tensor tensor, int to, const std::string& what);
  Pending receive(at::Tensor tensor, int from, const std::string& what);

  /// The sum over the members, in place, on all of them.
  Pending all_reduce_sum(at::Tensor tensor, const std::string& what);

  /// Largest value of each element over the members, in place. Blocks.
  void all_reduce_max(at::Tensor tensor, const std::string& what);

  /// [size] the words of each member. Blocks.
  std::vector<std::array<std::int64_t, 4>> all_gather(std::array<std::int64_t, 4> words,
                                                      const std::string& what);

 private:
  // On a CPU a call that is not asynchronous would block; elsewhere it runs on the current stream,
  // and an asynchronous one on a stream of the backend's.
  bool runs_beside() const { return device_ == c10::DeviceType::CPU; }
  std::string along(const char* does, const std::string& what) const;
  void count(const at::Tensor& tensor);
  void block(Pending pending, const std::string& what);
  Pending send_to_all(const at::Tensor& tensor, const std::string& what);
  template <typename Call>
  Pending issue(const std::string& what, Call&& call);
  // c10d's calls take lists.
  template <typename Call>
  Pending issue(const std::string& what, at::Tensor tensor, Call&& call);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  // The device's. Called directly: the dispatcher's way to it costs the host more than the rest.
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string name_;
  int rank_;
  int size_;
  c10::DeviceType device_;
  bool free_point_to_point_;
  bool groups_messages_ = false;
  std::shared_ptr<InFlight> in_flight_ = std::make_shared<InFlight>();
  std::shared_ptr<watch::Watch> watch_;
  watch::Rendezvous blocking_ = watch::Rendezvous::kComparison;
  Counter num_messages_;
  Counter num_bytes_;
};

}  // namespace dmuon::wire
