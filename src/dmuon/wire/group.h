#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "dmuon/watch/watch.h"
#include "dmuon/wire/pending.h"

namespace dmuon::wire {

/// A rank's sent messages, for benchmarks and tests. Bytes are payload. A broadcast counts once, at
/// its root, whatever tree the backend builds. The sending thread counts; any thread may read.
struct Traffic {
  std::int64_t num_messages = 0;
  std::int64_t num_bytes = 0;
};

/// A count that one thread increments while others read it.
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

/// One private process group and the calls that the engine makes on it.
///
///   Group row(process_group, "row", rank, size);
///   row.all_reduce_max(tensor, "the norms").wait();
///
/// A group of one has no process group and communicates nothing. Calls are issued at once, on the
/// current stream, in the caller's order. The order must be the same on all members. Not
/// thread-safe, but for receive(), which another thread may call beside one that calls the others.
class Group {
 public:
  /// @param name    "row", "column", ...: for error messages.
  /// @param device  of the tensors. A process group can have a backend for each device.
  /// @param order   [size] each member's rank in the process group, which counts its members by
  ///                global rank; empty if members have the same order.
  /// @param down    another process group of the same members, or null. Over gloo it carries what
  ///                members send() to lower ones; broadcasts too, in groups of up to four. gloo's
  ///                receiver tells the sender that it is ready by the connection on which it sends
  ///                itself, so that waits for what it sends. With a connection for each direction
  ///                nothing waits. When a wait fails, both groups' connections are closed: peers
  ///                that wait for this member fail at once, whichever group they wait in.
  Group(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string name, int rank, int size,
        c10::DeviceType device = c10::DeviceType::CPU, std::vector<int> order = {},
        c10::intrusive_ptr<c10d::ProcessGroup> down = {});

  int rank() const { return rank_; }
  int size() const { return size_; }
  c10::DeviceType device() const { return device_; }
  /// The longest time that a message may take on a device; without end for a group of one, or if
  /// the backend does not say.
  std::chrono::milliseconds timeout() const;
  Traffic traffic() const { return {num_messages_, num_bytes_}; }

  /// Keeps this copy's sends and receives apart from those of copies with another number, if the
  /// backend has tags. All members give equal numbers.
  void keep_apart(int number) { number_ = number; }

  /// Returns the store that the members share; null for a group of one.
  c10::intrusive_ptr<c10d::Store> store() const;

  /// Ends the waits of other threads and of the device. Afterwards every call throws the reason.
  /// The process group is never freed: its destructor would wait for messages that never come. May
  /// be called from any thread, and returns at once: NCCL ends its kernels first and then frees
  /// memory, which can wait for the kernels of other groups.
  /// @return  is ready when the device has nothing of this group any more.
  std::shared_future<void> give_up(const std::string& why);

  /// Ends all waits of this process group on a CPU over gloo, here and on the peers that wait for
  /// this member. A no-op elsewhere. Any thread may call it.
  void close_connections();

  /// True if sends and receives may be in flight in any number and direction without being grouped,
  /// as on gloo with host memory. NCCL serialises them by pair and may deadlock.
  bool free_point_to_point() const { return free_point_to_point_; }

  /// True if members have the order of the process group; equal on all members.
  bool in_order() const { return order_.empty(); }

  /// Sends one message from `root` to all members; each receives the payload once. Uses the
  /// backend's tree of log2(size) steps. In a group of up to four, gloo sends straight from the
  /// root instead: the tree is no shorter there, and gloo's broadcast needs another thread.
  Pending broadcast(at::Tensor tensor, int root, const std::string& what);

  /// Groups the messages that `issue` issues into one launch and one Pending, if the backend can.
  /// All members issue the same.
  /// @throws CommError as the calls in `issue`; then none of them is in flight.
  std::vector<Pending> together(const std::string& what,
                                const std::function<std::vector<Pending>()>& issue);

  /// Sums to `root` by the backend's own reduction. Other members' tensors are undefined
  /// afterwards.
  Pending reduce_sum(at::Tensor tensor, int root, const std::string& what);

  /// Sends every member's part to all others, in place. Member g's part of `packed`, [flat], is the
  /// g-th of equal ones. Members have the order of the process group.
  Pending all_gather_equal(const at::Tensor& packed, const std::string& what);

  /// Sums every part to its member, in place. Parts are those of all_gather_equal; the other parts
  /// are undefined afterwards.
  Pending reduce_scatter_equal(const at::Tensor& packed, const std::string& what);

  Pending send(at::Tensor tensor, int to, const std::string& what);
  Pending receive(at::Tensor tensor, int from, const std::string& what);

  /// Sends `sent[m]` to member m and receives `received[m]` from it, of all members at once: one
  /// message to each other member and one from it. Copies the own part. Empty tensors send nothing.
  /// @param received, sent  [size] flat; what one member sends another receives, of equal sizes.
  std::vector<Pending> all_to_all(const std::vector<at::Tensor>& received,
                                  const std::vector<at::Tensor>& sent, const std::string& what);

  /// Computes the largest value of each element over the members, in place, on all of them.
  Pending all_reduce_max(at::Tensor tensor, const std::string& what);

  /// Writes the members' tensors, which are equal in size, into `all`, [size, ...].
  Pending all_gather(const at::Tensor& all, const at::Tensor& own, const std::string& what);

 private:
  // On a CPU a synchronous call blocks, so calls are asynchronous. Elsewhere a synchronous call
  // runs on the current stream, an asynchronous one on a stream of the backend's.
  bool runs_beside() const { return device_ == c10::DeviceType::CPU; }
  int in_process_group(int member) const {
    return order_.empty() ? member : order_.at(static_cast<std::size_t>(member));
  }
  c10d::Backend& between(int from, int to) const {
    return from > to && down_backend_ ? *down_backend_ : *backend_;
  }
  int tag_of(const std::string& what) const;
  std::string along(const char* does, const std::string& what) const;
  void count(const at::Tensor& tensor, std::int64_t times = 1);
  at::Tensor own_part(const at::Tensor& packed) const;
  Pending send_to_all(const at::Tensor& tensor, const std::string& what);
  template <typename Call>
  Pending issue(const std::string& what, Call&& call);
  // c10d's calls take lists.
  template <typename Call>
  Pending issue(const std::string& what, at::Tensor tensor, Call&& call);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  // The device's backend, called directly: c10d's dispatcher costs the host more than the rest.
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::intrusive_ptr<c10d::ProcessGroup> down_;
  c10::intrusive_ptr<c10d::Backend> down_backend_;  // null if `backend_` carries everything
  std::string name_;
  int rank_;
  int size_;
  std::vector<int> order_;
  c10::DeviceType device_;
  int number_ = 0;
  bool free_point_to_point_;
  bool groups_messages_ = false;
  std::shared_ptr<InFlight> in_flight_ = std::make_shared<InFlight>();
  Counter num_messages_;
  Counter num_bytes_;
};

}  // namespace dmuon::wire
