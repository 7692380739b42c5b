#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/schedule/order.h"
#include "dmuon/schedule/step_schedule.h"

namespace dmuon::simulate {

/// Something that a training program does, on all ranks alike.
struct TrainingEvent {
  enum class What : int { kTrainForward, kEvaluation, kBackward, kBackwardNoSync, kStep };
  What what = What::kStep;
  /// The uses of the pass in place of the job's; they may deviate from the trace. No use is inside
  /// another, because a replay may free units that the trace does not use. Empty: the job's uses.
  schedule::Trace instead{};
  bool operator==(const TrainingEvent&) const = default;
};

inline bool is_backward(TrainingEvent::What what) {
  return what == TrainingEvent::What::kBackward || what == TrainingEvent::What::kBackwardNoSync;
}

/// The ranks at `slot` do not use `unit` in the event at `event`.
struct Skip {
  core::Slot slot;
  int event = 0;  ///< place in Job::events
  core::UnitIndex unit;
};

/// A training program of all ranks of a mesh, over several steps. The first pass of each kind is
/// traced.
struct Job {
  schedule::Layout layout;
  schedule::StepOptions options;
  schedule::Trace forward;     ///< kBeforeUse ... kAfterForward of each use
  schedule::Trace backward;    ///< kBeforeUse ... kAfterBackward of each use
  schedule::Trace evaluation;  ///< as `forward`
  /// Every part of a unit that is not empty is touched by a batch of its owner.
  core::Vector<core::Slot, schedule::Batches> batches;
  std::vector<TrainingEvent> events;
  /// In a pass that all ranks must run alike (it is traced, or deviates), a skip leaves out the
  /// compute alone.
  std::vector<Skip> skips;
  /// Units whose uses are reads: readers report them, see schedule::Resolver::after_read().
  std::set<core::UnitIndex> read{};
};

/// Returns the uses of an event: its own, or the job's for passes of its kind.
const schedule::Trace& uses_of(const Job& job, const TrainingEvent& event);

/// The compute of a module, which no schedule holds.
enum class Compute : int {
  kForward,   ///< reads the unit's weights
  kBackward,  ///< reads the unit's weights, writes its gradients
};

/// Something that a rank issues: an operation, or the compute of a module.
struct Issue {
  std::optional<Compute> compute{};  ///< of the unit that `operation` is on; its kind means nothing
  schedule::Operation operation;
  int event = 0;                                 ///< place in Job::events
  int step = 0;                                  ///< steps taken before it
  std::optional<schedule::Crossing> crossing{};  ///< the crossing or use that it belongs to

  bool is(schedule::Kind kind) const { return !compute && operation.kind == kind; }
  bool is(Compute of) const { return compute == of; }
  bool is_on_batch() const { return !compute && schedule::is_on_batch(operation.kind); }
  schedule::Lane lane() const {
    return compute ? schedule::Lane::kCompute : schedule::lane_of(operation.kind);
  }
  /// True if other ranks issue the same, in the same order.
  bool carries_messages() const { return schedule::carries_messages(lane()); }
  core::UnitIndex unit() const { return operation.unit(); }
  /// The version of the weights that it sends, changes or reads.
  int version() const { return step + operation.version; }
};

/// A place where a rank compares its trigger with all others before it goes on, or where it leaves
/// for the host framework's collectives.
struct Comparison {
  int num_messages = 0;                        ///< operations of communication issued before it
  std::optional<schedule::Trigger> trigger{};  ///< none: the end of a pass
  bool operator==(const Comparison&) const = default;
};

/// Everything that one rank issues, in order.
struct Program {
  std::shared_ptr<const schedule::Layout> layout;  ///< as this rank believes it to be
  schedule::Batches batches;
  std::vector<Issue> issues;
  std::vector<Comparison> comparisons;
  std::vector<Comparison> leaves;  ///< see schedule::Performer::leave_to_host()
  std::uint64_t hash = 0;          ///< schedule::Resolver::hash() at the end

  const Issue& issue(int index) const { return issues[static_cast<std::size_t>(index)]; }
  int num_issues() const { return static_cast<int>(issues.size()); }
};

/// By the ranks' numbers, see layout::Mesh. Without tensor parallelism these are slots.
using Programs = core::Vector<core::Owner, Program>;

/// Unrolls the job into the program of each rank: the operations that a schedule::Resolver decides
/// on, and the compute of modules. Programs differ in operations on batches, and in the compute of
/// units that a rank skips. The ranks of a slot have the same program. A rank that skips all units
/// of the last backward before a step does not run it.
/// @throws InvalidArgument for a slot, an event or a unit out of range, or bad options.
Programs unroll(const Job& job);

/// Marks one place in a program for each lane: the newest issue of that lane, -1 for none. A lane
/// runs its issues in order, so a frontier stands for everything that was done before.
using Frontier = schedule::PerLane<int>;
constexpr Frontier kNothing{-1, -1, -1, -1, -1};

/// [issues] what must be done before each starts: the issue before it on its lane, the compute
/// before it, and its dependencies. On a lane that carries messages, in place of the issue before
/// it, what that one waits for. Dependencies that were never issued are left out.
std::vector<Frontier> waits_on(const Program& program);

/// Remembers the newest issue of each kind on each subject, -1 for none.
class Newest {
 public:
  explicit Newest(const Program& program);
  int of(const schedule::Dependency& named) const;
  void set(const schedule::Operation& operation, int index);

 private:
  static auto& kinds(auto& self, const schedule::Subject& subject) {
    if (const auto* unit = std::get_if<core::UnitIndex>(&subject)) return self.units_.at(*unit);
    return self.batches_.at(std::get<core::BatchIndex>(subject));
  }

  core::Vector<core::UnitIndex, schedule::PerKind<int>> units_;
  core::Vector<core::BatchIndex, schedule::PerKind<int>> batches_;
};

/// Prints like "publish intra of unit 3" and "forward of unit 0".
std::string describe(const Issue& issue);

}  // namespace dmuon::simulate
