#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/schedule/step_schedule.h"

namespace dmuon::simulate {

/// Something that a training program does, on all ranks alike.
struct Event {
  enum class What : int { kTrainForward, kEvaluation, kBackward, kBackwardNoSync, kStep };
  What what = What::kStep;
  /// Triggers of the pass that follow the schedule, the rest being served on demand: 0 for a pass
  /// that is being traced, fewer than the trace has for one that deviates. -1: all.
  int replayed = -1;
  bool operator==(const Event&) const = default;
};

/// The rank at `slot` does not use `unit` in the event at `event`.
struct Skip {
  int slot;
  int event;  ///< place in Job::events
  int unit;
};

/// What all ranks of a mesh do over several steps.
struct Job {
  schedule::Layout layout;
  schedule::Options options;
  bool reshard_after_forward = true;  ///< as `forward` and `backward` have it
  schedule::Trace forward;            ///< as replayed: a reshard that ends it is left out
  schedule::Trace backward;
  schedule::Trace evaluation;
  /// [slots][batches of the slot] the units that each touches. Every part of a unit that is not
  /// empty is touched by a batch of its owner.
  std::vector<std::vector<std::vector<int>>> batches;
  std::vector<Event> events;
  std::vector<Skip> skips;
};

/// An operation as a rank issues it.
struct Issue {
  schedule::Operation operation;
  int step = 0;           ///< steps taken before it
  bool backward = false;  ///< in a backward
  /// Of the weights that it moves or reads.
  int version() const { return step + operation.version; }
};

/// Everything that one rank issues, in order.
struct Program {
  std::shared_ptr<const schedule::Layout> layout;  ///< as this rank believes it to be
  std::vector<std::vector<int>> batches;
  std::vector<Issue> issues;
};

/// What each rank issues: the same on all but for kUpdate, and for kForward and kBackward of units
/// that it skips. Passes never end early: what a rank skips is crossed all the same.
/// @return [slots]
/// @throws InvalidArgument for a slot, an event or a unit out of range, or bad options.
std::vector<Program> unroll(const Job& job);

/// The bytes that weights, gradients and inboxes of a rank may take at most:
/// (open + units_in_flight - 1) * (largest weights + largest gradients), where `open` is the
/// largest number of units in use at once. A unit that a forward keeps is in use until it is freed;
/// in a backward, a unit is in use from its first use to the end of its last, when its gradients
/// leave. Without a reshard after the forward, or where a pass deviates, there is no such bound:
/// the largest integer.
std::int64_t granted_bytes(const Job& job);

/// Prints like "publish intra of unit 3".
std::string describe(const schedule::Operation& operation);

}  // namespace dmuon::simulate
