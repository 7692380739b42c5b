#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "async_device/csrc/device.h"
#include "async_device/csrc/gloo_calls.h"

namespace async_device {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// A call of a group, not yet issued.
struct Call {
  std::string name;
  c10d::OpType type;
  Tensors reads;
  Tensors writes;
  bool is_async;                     // in the group's own stream; else in the current one
  int64_t bytes_sent;                // by this rank, by the cheapest ring
  std::function<void()> run;         // communicates, on the host's side; blocks
  int peer = -1;                     // of a message; -1: all ranks take part
  std::function<WorkPtr()> start{};  // of a message, instead of `run`: does not block
  bool blocks_host = false;          // its work's wait does
};

/// The part of a call that outlives it: its end, and the tensors that it needs until a wait.
struct Flight {
  EventPtr end;
  LaunchPtr launch;
  Tensors held;
};

/// Process group of the device: NCCL's semantics, run by gloo. A call puts one entry into a
/// stream and returns; the work's `wait` makes the current stream wait. The calls of one group, and
/// those between one pair of ranks, follow each other in the order of issue, whatever their
/// streams. CPU tensors go to gloo. As with NCCL, one thread at a time may call it.
class Group final : public c10d::Backend {
 public:
  /// @param name  c10d's, the same on all ranks.
  Group(c10::intrusive_ptr<c10d::Backend> gloo, std::string name, std::vector<int> global_ranks,
        std::chrono::milliseconds timeout);
  /// Waits for all issued calls.
  ~Group() override;

  const std::string getBackendName() const override { return "emulated"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_launches_; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void shutdown() override;
  /// Ends all issued calls and refuses more; waits for them raise.
  void abort() override;

  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::AllgatherOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&,
                         const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr send(Tensors&, int to, int tag) override;
  WorkPtr recv(Tensors&, int from, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;

 private:
  /// Its operations follow each other.
  struct Communicator {
    Stream* stream = nullptr;
    EventPtr last{};
  };

  /// Issues a call, or keeps it for `endCoalescing`.
  WorkPtr add(Call call);
  /// Issues calls as one launch.
  WorkPtr issue(std::vector<Call> calls, const std::string& name, c10d::OpType type);
  /// Reports the launch to LaunchOrder.
  void note_order(const std::vector<Call>& calls, const std::string& name, int peer) const;
  void forget_finished();

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  std::vector<int> global_ranks_;
  c10::intrusive_ptr<Options> options_;
  int64_t id_;                                 // of the process
  std::map<int, Communicator> communicators_;  // by peer; -1: of all ranks
  std::vector<std::shared_ptr<Flight>> flights_;
  std::vector<Call> coalesced_;
  bool is_coalescing_ = false;
  uint64_t num_launches_ = 0;
  std::string abort_error_;
};

}  // namespace async_device
