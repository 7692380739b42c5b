#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "dmuon/core/hash.h"
#include "dmuon/core/index.h"
#include "dmuon/schedule/maker.h"
#include "dmuon/schedule/order.h"
#include "dmuon/schedule/step_schedule.h"

namespace dmuon::schedule {

/// Performs the operations that a Resolver decides on: the engine on tensors, the simulator on a
/// list.
class Performer {
 public:
  virtual ~Performer() = default;

  /// Compares that all ranks are at this trigger or, without one, at the end of their pass. Comes
  /// before the trigger's operations. May throw.
  virtual void compare(const std::optional<Trigger>& trigger) = 0;

  /// A backward outside of no_sync, which has crossed so many triggers, is about to cross the next.
  /// All ranks call it at the same place between operations. May throw.
  virtual void before_crossing(int /*num_crossed*/) {}

  /// Runs the operation. Everything that it needs has been performed before. May throw.
  virtual void perform(const Operation& operation) = 0;

  /// Says that the host framework's own collectives may come next: before this use, after this
  /// backward or, without a trigger, at the end of the whole backward. Comes at the same place
  /// between operations on every rank, also on ranks that skipped the unit.
  virtual void leave_to_host(const std::optional<Trigger>& trigger) = 0;

  /// Says that a forward has begun, in which the host framework may first have collectives that
  /// belong to no unit.
  virtual void leave_before_forward() = 0;
};

/// Units that readers use at once, such as one layer of each tower. No option sets it, because in a
/// traced pass it decides how often a unit's gradients are routed, and so in which order they add
/// up.
inline constexpr int kMostRead = 4;

/// Decides which operations run when a rank's hooks report a trigger:
///
///     Resolver resolver(layout, options, batches, &performer);
///     resolver.begin_forward(/*training=*/true);
///     resolver.before_use(unit);  // performer.perform(...) for each operation
///
/// The Order decides which triggers are crossed. A crossing's schedule holds its operations; if no
/// trace is followed, they are everything that the trigger needs. A schedule is built without
/// knowing which pass came before, so that any pass may follow any other. Only the resolver knows
/// what has been done already, and leaves it out. The engine and the simulator use the same
/// resolver, so the simulator's proofs hold for the engine.
///
/// The rule of each operation:
///
/// - kPublishInter runs unless stage 1 of the current version has been issued: into the node copy
///   or, without node copies, into the packed buffer since it was freed.
/// - kPublishIntra runs unless the packed buffer has been filled since it was freed. A missing
///   stage 1 goes before it.
/// - kAwaitWeights runs unless compute has waited since the buffer was filled.
/// - kReshard runs if the buffer is filled. It also runs if stage 1 may still be in flight, which
///   reads the masters that the update is about to change. It never runs in a backward that keeps
///   weights, and for replicated weights only where a new version begins.
/// - kRouteIntra runs after the unit's route that is still in flight has been finished.
/// - kFinishRouteIntra runs if stage 1 of the unit's route is in flight; kFinishRouteInter if stage
///   2 is, after stage 1 has been finished.
///
/// - Operations on batches run as they come, each once a step. kFinishUpdate runs once after each
///   kApply, in step() or later.
///
/// "Issued" and "filled" mean the order of issue, not how far a lane has come. So ranks that cross
/// the same triggers issue the same operations.
///
/// Deterministic. Not thread-safe. Passes the performer's exceptions on; an operation that threw
/// counts as not done.
class Resolver {
 public:
  /// @param batches  this rank's.
  /// @param performer  outlives this.
  /// @throws InvalidArgument for options out of range.
  Resolver(Layout layout, const StepOptions& options, Batches batches, Performer* performer);

  // Reports of hooks. Each returns when the performer has run the operations that follow.

  /// Settles, and opens the pass.
  /// @param whole  of the model itself: end_forward() follows, and nothing else ends it.
  void begin_forward(bool training, bool whole = false);
  /// The model's own forward is over. Submodules may still be called by themselves.
  void end_forward();
  /// True if an evaluation forward is open that a use with gradients ends: it is not the model's
  /// own, and reads no weights now.
  bool may_begin_training() const;
  /// A forward, or a recomputation in a backward, is about to read the unit's weights.
  /// @param reader  true if one of several modules that read them reports it: their calls together
  ///                are one use.
  void before_use(core::UnitIndex unit, bool reader = false);
  /// Says if the unit's weights are being read, by a call or a backward whose end will be reported.
  /// A replay deviates before it would free them. Comes after the report of what began, and before
  /// that of what has ended. A new pass reads nothing.
  void set_in_use(core::UnitIndex unit, bool in_use) { units_.at(unit).in_use = in_use; }
  /// A reader's call, or its backward, is over, and the use that `end` ends with it if no other
  /// reader comes. A traced pass ends it when kMostRead other units are read, or at its own end.
  void after_read(Trigger end);
  /// A unit that the backward begins with is kept.
  void after_forward(core::UnitIndex unit);
  /// Settles, and opens the pass.
  /// @param keeps_weights  the pass frees no weights: the next update does. Alike on all ranks.
  void begin_backward(bool keeps_weights = false);
  /// The unit's gradients of an earlier use have left when this returns.
  void before_backward(core::UnitIndex unit, bool reader = false);
  /// A gradient of the unit is about to be taken.
  void before_gradient(core::UnitIndex unit);
  /// Does nothing outside of a backward's pass.
  void after_backward(core::UnitIndex unit);
  /// Crosses what the backward owes. Then releases the units that are still in use, because their
  /// inputs need no gradient or because gradients came without a use. Routes stay in flight.
  void end_backward();
  /// Ends an open pass of any kind. A backward's routes stay in flight.
  void end_pass();

  /// Ends the pass and waits for all routes.
  void settle();
  /// Before a step's agreement: settles, takes part in an owed backward, and sends on the partial
  /// sums.
  /// @param after_owed  called behind an owed backward; true if that was outside of no_sync.
  void settle_step(const std::function<void(bool)>& after_owed = [](bool) {});
  /// Settles. Updates this rank's batches, and begins a new version of the weights. With
  /// StepOptions::late_updates the batches may be under way when this returns.
  void step() { renew(/*updates=*/true); }
  /// Lets compute wait for the batches of a late update. A backward, settle_step() and step() begin
  /// with it; a forward does not. Comes before all else that reads or writes what owners hold.
  void finish_update();
  /// True if an update has been issued for which nothing has waited.
  bool has_update() const { return !updates_.empty(); }
  /// As step(), where the owners' weights were changed by other means: updates no batch.
  void publish() { renew(/*updates=*/false); }
  /// Settles, waits for a late update, and frees all weights. Each use after it sends them again.
  void free_weights();
  /// Waits for all routes in the order of issue.
  void finish_routes();

  /// Runs all operations that a trigger needs by itself, outside of any order.
  void serve(Trigger trigger);

  /// false: the next backwards' gradients stay at the column members. Alike on all ranks.
  void set_sync(bool sync) { sync_ = sync; }
  bool syncs() const { return sync_; }

  /// True if a unit's weights may be read.
  bool ready(core::UnitIndex unit) const { return units_.at(unit).ready; }
  /// True if column members hold partial sums. Equal on all ranks.
  bool holds_partial_sums() const;
  /// True if settle_step() will run a backward: other ranks may have run one while this rank's loss
  /// touched nothing.
  bool owes_backward() const { return order_.owes_backward(); }

  const Order& order() const { return order_; }
  const Layout& layout() const { return layout_; }
  /// Triggers that the last backward has crossed so far.
  int num_crossed() const { return num_crossed_; }
  /// The crossing whose operations are being performed, if any.
  const std::optional<Crossing>& crossing() const { return crossing_; }

  /// A hash of all crossed triggers and of the schedules. They decide what is issued, so ranks that
  /// have issued the same have equal hashes.
  std::uint64_t hash() const { return issued_.value(); }

 private:
  static constexpr int kNone = -1;

  /// All that has been issued for a unit, as far as it decides what runs next.
  struct Progress {
    int stage_1 = kNone;          // version that it has sent
    bool stage_1_awaited = true;  // compute has waited since it was issued
    bool filled = false;          // stage 2 was issued since the buffer was freed
    bool ready = false;           // and compute has waited for it
    bool used = false;            // in the pass that is open; if empty, since its last release
    bool trained = false;         // used in a training forward since the last backward
    bool owes_route = false;      // used in a backward, or given a gradient, since the last
    bool in_stage_1 = false;      // its route is in flight, with its gradients
    bool in_stage_2 = false;      // likewise, with the node's mean
    bool held = false;            // column members hold partial sums
    bool in_use = false;          // see set_in_use()
  };

  const PassSchedule& schedule_of(Pass pass) const;
  void renew(bool updates);
  void forget_uses();
  void run_owed_backward();
  void rebuild_schedule();
  void request(Trigger trigger);
  bool any_in_use() const;
  void end_reads(std::size_t remaining);
  void confirm_end();
  void cross(const std::vector<Crossing>& crossings);
  void resolve(const Operation& operation);
  void end_use(Progress* unit, const Operation& reshard);
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
  bool has_host_ = false;                  // any unit is a host unit
  std::vector<core::UnitIndex> routes_;    // in flight, in order of issue
  std::vector<core::BatchIndex> updates_;  // that compute has not waited for, in order of issue
  std::optional<Crossing> crossing_;
  int version_ = 0;
  bool sync_ = true;
  bool keeps_weights_ = false;  // in the open backward
  int num_crossed_ = 0;         // by it
  bool forward_sync_ = true;    // as the last training forward found it
  core::Hasher issued_;
};

}  // namespace dmuon::schedule
