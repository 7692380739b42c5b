#pragma once

#include "dmuon/predict/rates.h"
#include "dmuon/predict/timeline.h"
#include "dmuon/simulate/execution.h"

// dmuon's own step: the engine's resolver decides what runs.
namespace dmuon::predict {

/// The unit of all parameters that Muon does not take: embeddings, head, norms. FSDP2 shards it, so
/// every slot owns an equal part of it. Beside replicated weights every rank has all of it. It
/// comes before the plan's units.
inline constexpr core::UnitIndex kOutside{0};

/// Returns how often an operation's bytes travel in a job of owned_job(). HSDP sums gradients of
/// kOutside between nodes, there and back, and sends none of its weights there. FSDP2's root group
/// keeps its weights from the forward to the backward. Beside replicated weights gradients of
/// kOutside are summed over all slots, and none of its weights travel.
double times_sent(const plan::Plan& plan, const simulate::Issue& issue);

/// Returns training steps of a plan, whose units run in order once a pass. Without parameters
/// outside of Muon kOutside is empty.
simulate::Job owned_job(const Setting& setting, int num_steps);

/// Unrolls such a job. Compute then also waits for the gradients of kOutside before the backward
/// ends: FSDP2 lets its stream wait for them there, and over gloo its calls block the host.
simulate::Programs owned_programs(const Setting& setting, const simulate::Job& job);

/// Returns what a rank issues in a step after the first, in order, without that wait.
std::vector<simulate::Issue> owned_step(const Setting& setting, core::Owner rank);

/// Returns the bytes that each rank receives from the others of its slot in an update, or the bytes
/// that it sends to them, whichever are more. Directions travel in fp32, results in the iteration's
/// dtype.
core::PerOwner<double> exchanged_bytes(const plan::Plan& plan);

/// The durations of these steps, operation by operation.
class OwnedDurations : public simulate::Durations {
 public:
  /// @param job  owned_job(setting, ...). Both must outlive the object.
  OwnedDurations(const Setting& setting, const simulate::Job& job);

  double work_us(core::Owner rank, const simulate::Issue& issue) override;
  double message_us(core::Owner rank, const simulate::Issue& issue,
                    const schedule::Message& message) override;
  double idle_us(core::Owner rank, const simulate::Issue& issue) override;
  /// The end of an issue in which the host waits for a sum (Setting::host_sum_ms). The backward of
  /// a unit has one. kOutside has none, because its sum is a route.
  double host_sum_us(const simulate::Issue& issue) const;
  // NCCL's collectives begin when all members have come.
  bool rendezvous() const override { return !setting_.plan.options.on_cpu; }

 private:
  struct Shares {
    double row = 0;               // microseconds a byte of an element's size
    std::vector<double> columns;  // [columns] likewise
    std::vector<double> idle_us;  // [columns] of one without bytes: others' take the node's adapter
  };
  using Columns = std::vector<std::vector<double>>;  // [columns][replicates] bytes
  const Shares& shares_of(const simulate::Issue& issue) const;
  Shares shares_of(const schedule::UnitLayout& unit, bool publishes) const;
  std::size_t column_of(core::Owner rank) const;
  int senders() const;  // that a slot has, each with an equal part of an owner's bytes
  Columns columns_of(const schedule::UnitLayout& unit, bool publishes) const;
  void fill_directions(bool publishes);

  const Setting& setting_;
  const schedule::Layout& layout_;
  Rates rates_;
  double host_sum_us_;
  core::Vector<core::UnitIndex, double> forward_us_;
  core::Vector<core::UnitIndex, Shares> weights_, gradients_;
  core::PerOwner<std::vector<double>> updates_us_;  // [batches of a slot]
};

}  // namespace dmuon::predict
