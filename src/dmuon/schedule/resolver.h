#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dmuon/core/hash.h"
#include "dmuon/core/index.h"
#include "dmuon/schedule/maker.h"
#include "dmuon/schedule/order.h"
#include "dmuon/schedule/step_schedule.h"

namespace dmuon::schedule {

/// Does what a Resolver says: the engine on tensors, the simulator on a list.
class Performer {
 public:
  virtual ~Performer() = default;

  /// All ranks must be at this trigger, or, without one, at the end of their pass. Nothing of it
  /// has been issued yet. May throw.
  virtual void compare(const std::optional<Trigger>& trigger) = 0;

  /// The operation runs now; what it needs has been performed before. May throw.
  virtual void perform(const Operation& operation) = 0;

  /// The host framework's own collectives may come next: before this use, after this backward, or,
  /// without a trigger, at the end of all of it. At the same place between operations on every
  /// rank, those too that skipped the unit.
  virtual void leave_to_host(const std::optional<Trigger>& trigger) = 0;
};

/// Turns what a rank's hooks say into the operations that run. It is the only place that knows what
/// has been done already; the engine and the simulator both do what it tells them, so what the
/// simulator proves is what the engine runs.
///
/// A hook's trigger is crossed where the Order says so, and a crossing's operations are its
/// schedule's, or, where no trace is followed, everything that the trigger needs. Of these
/// operations, whose places were chosen without knowing what came before, so that any pass may
/// follow any other:
///
/// - kPublishInter runs unless stage 1 of the current version has been issued: into the node copy,
///   or, without node copies, into the packed buffer since it was freed.
/// - kPublishIntra runs unless the packed buffer has been filled since it was freed. Stage 1 goes
///   before it where it is missing.
/// - kAwaitWeights runs unless compute has waited since the buffer was filled.
/// - kReshard runs if the buffer is filled, or if stage 1 may still be on its way, for that reads
///   what the update is about to change.
/// - kRouteIntra runs after the unit's route that is still in flight has been finished.
/// - kFinishRouteIntra runs if stage 1 of the unit's route is in flight; kFinishRouteInter if stage
///   2 is, after stage 1 has been finished.
///
/// - Operations on batches run as they come, each once a step.
///
/// "Issued" and "filled" are by order of issue; whether a lane has come so far does not matter. So
/// ranks whose triggers are crossed alike issue alike.
///
/// Deterministic. Not thread-safe. An exception of the performer passes through; the operation that
/// threw then counts as not done.
class Resolver {
 public:
  /// @param batches  this rank's.
  /// @param performer  outlives this.
  /// @throws InvalidArgument for options out of range.
  Resolver(Layout layout, const StepOptions& options, Batches batches, Performer* performer);

  // What hooks say. Each returns when the performer has done what follows from it.

  /// Settles, and opens the pass.
  /// @param whole  of the model itself: end_forward() follows, and nothing else ends it.
  void begin_forward(bool training, bool whole = false);
  /// The model's own forward is over; what follows in the pass is driven through submodules.
  void end_forward() { whole_forward_ = false; }
  /// A forward, or a recomputation in a backward, is about to read the unit's weights.
  void before_use(core::UnitIndex unit);
  /// A unit that the backward begins with is kept.
  void after_forward(core::UnitIndex unit);
  /// Settles, and opens the pass.
  void begin_backward();
  /// The unit's gradients of an earlier use have left when this returns.
  void before_backward(core::UnitIndex unit);
  /// A gradient of the unit is about to be taken.
  void before_gradient(core::UnitIndex unit);
  /// Nothing outside of a backward's pass.
  void after_backward(core::UnitIndex unit);
  /// What the backward owes, then the release of units whose last use has not been released: their
  /// inputs need no gradient, or their gradients came without one. Routes travel on.
  void end_backward();
  /// Ends an open pass of any kind; a backward's routes travel on.
  void end_pass();

  /// Ends the pass and waits for all routes.
  void settle();
  /// Before a step's agreement: settles, takes part in a backward that other ranks may have run
  /// while this rank's loss touched nothing, and sends on the partial sums.
  void settle_step();
  /// Settles. Updates this rank's batches, and begins a new version of the weights.
  void step();
  /// As step(), where the owners' weights were changed by other means: updates no batch.
  void publish();
  /// Waits for all routes in the order of issue.
  void finish_routes();

  /// All that a trigger needs by itself, outside of any order.
  void serve(Trigger trigger);

  /// false: the next backwards' gradients stay at the column members. Alike on all ranks.
  void set_sync(bool sync) { sync_ = sync; }
  bool syncs() const { return sync_; }

  /// Whether a unit's weights may be read.
  bool ready(core::UnitIndex unit) const { return units_.at(unit).ready; }
  /// Whether column members hold partial sums; alike on all ranks.
  bool holds_partial_sums() const;
  /// Whether settle_step() will run a backward.
  bool owes_backward() const { return order_.owes_backward(); }

  const Order& order() const { return order_; }
  const Layout& layout() const { return layout_; }
  /// As it stands; passes that have not been traced are empty.
  const StepSchedule& schedule() const { return schedule_; }
  /// Whose operations are being performed, if they are a crossing's.
  const std::optional<Crossing>& crossing() const { return crossing_; }

  /// A hash of all triggers that were crossed and of the schedules. What is issued follows from
  /// them, so it is equal on ranks that have issued the same.
  std::uint64_t hash() const { return issued_.value(); }

 private:
  static constexpr int kNone = -1;

  /// All that has been issued for a unit, as far as it decides what runs next.
  struct Progress {
    int part = kNone;          // version of stage 1
    bool part_awaited = true;  // compute has waited since stage 1 was issued
    bool filled = false;       // stage 2 was issued since the buffer was freed
    bool ready = false;        // and compute has waited for it
    bool used = false;         // in the pass that is open; if empty, since its last release
    bool trained = false;      // used in a training forward since the last backward
    bool owes_route = false;   // used in a backward, or given a gradient, since the last
    bool in_stage_1 = false;   // its route is in flight, with its gradients
    bool in_stage_2 = false;   // likewise, with the node's mean
    bool held = false;         // column members hold partial sums
  };

  const PassSchedule& schedule_of(Pass pass) const;
  void forget_uses();
  void rebuild_schedule();
  void request(Trigger trigger);
  void confirm_end();
  void cross(const std::vector<Crossing>& crossings);
  void resolve(const Operation& operation);
  void reshard(Progress* unit, const Operation& operation);
  void finish_stage_1(core::UnitIndex unit);
  void finish_stage_2(core::UnitIndex unit);

  Layout layout_;
  StepOptions options_;
  Batches batches_;
  Performer* performer_;
  Maker maker_;
  Order order_;
  StepSchedule schedule_;
  core::Vector<core::UnitIndex, Progress> units_;
  bool has_host_ = false;                // any unit is a host unit
  std::vector<core::UnitIndex> routes_;  // in flight, in order of issue
  std::optional<Crossing> crossing_;
  int version_ = 0;
  bool sync_ = true;
  bool whole_forward_ = false;
  bool forward_sync_ = true;  // as the last training forward found it
  core::Hasher issued_;
};

}  // namespace dmuon::schedule
