#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/core/hash.h"
#include "dmuon/schedule/trigger.h"

namespace dmuon::schedule {

/// An ordered queue of operations that overlaps with the other lanes.
enum class Lane : int {
  kCompute,  ///< the training program itself; an operation here blocks it
  kIntra,    ///< messages inside a node: the row
  kInter,    ///< messages between nodes: the column
};

enum class Kind : int {
  kUpdate,        ///< compute: momentum, Newton-Schulz and new masters of one batch of this rank
  kPublishInter,  ///< stage 1: owner's weight -> its column's member on every node
  kPublishIntra,  ///< stage 2: column members -> the packed buffer of every rank of the node
  kAwaitWeights,  ///< compute waits until the packed buffer is filled
  kForward,       ///< compute: the module reads its weights (the engine itself does nothing)
  kBackward,      ///< compute: the module reads its weights and writes its gradients (likewise)
  kReshard,       ///< compute: frees the packed buffer of weights
  kRouteIntra,    ///< stage 1: gradients -> the column member; adds, and accumulates where R = 1
  kRouteInter,    ///< stage 2: column members -> the owner, which accumulates
  kFinishRoute,   ///< compute waits for the unit's route and frees its gradients
};
constexpr int kNumKinds = 10;

const char* name_of(Kind kind);
const char* name_of(Lane lane);
Lane lane_of(Kind kind);

/// The newest operation of `kind` on `unit` that was issued before.
struct Dependency {
  Kind kind;
  int unit;
  bool operator==(const Dependency&) const = default;
};

/// One operation. Issuing it on a lane of communication does not wait; it runs after everything
/// issued on its lane before, after everything done on the compute lane before, and after what
/// `after` names. A kReshard waits for nothing where nothing of that kind was issued.
///
/// Two are idempotent, so that a pass may follow any other; what they find is what was issued
/// before, done or not. kPublishInter does nothing where the node copy has the version or is about
/// to; without node copies, where it was issued since the packed buffer was freed. kPublishIntra
/// does nothing where it was issued since then. One that does nothing is not an operation "issued
/// before" for others.
struct Operation {
  Kind kind;
  int unit = 0;  ///< the index of the batch for kUpdate
  int version =
      0;  ///< of the weights, counted from those that the step began with: 1 after the update
  std::vector<Dependency> after;
  bool operator==(const Operation&) const = default;
};

/// A unit as the schedule sees it.
struct UnitLayout {
  std::string name;
  std::vector<std::int64_t>
      owner_elements;     ///< [slots] elements of each owner's part of a packed buffer
  int weight_size = 4;    ///< bytes of an element of weights as they travel
  int gradient_size = 4;  ///< likewise of gradients

  std::int64_t num_elements() const;
};

/// A mesh of R replicates (nodes) of G shards; slot = replicate * G + shard.
struct Layout {
  int num_replicates = 1;
  int num_shards = 1;
  std::vector<UnitLayout> units;
  int num_slots() const { return num_replicates * num_shards; }
};

/// One collective of an operation.
struct Message {
  enum class Group : int { kRow, kColumn } group;
  int root;            ///< member index in the group: who sends (publish) or receives (route)
  std::int64_t bytes;  ///< payload from or to each other member
  bool operator==(const Message&) const = default;
};

/// What a rank sends and receives for an operation, in the order of issue. Empty parts and groups
/// of one send nothing.
std::vector<Message> messages_of(const Operation& operation, const Layout& layout, int slot);

struct Options {
  bool node_copy = true;  ///< column members keep what came from other nodes until the next version
  /// Stage 1 of a unit is issued this many uses ahead; 0: everything is sent when it is needed.
  int lookahead = 2;
  /// Units whose packed weights or gradients may be in memory at once, 2 or more; 0: lookahead
  /// + 2.
  int max_units_in_flight = 0;
  /// The backward's next weights are sent before this unit's gradients (the paper,
  /// sec:design-schedule).
  bool broadcast_before_reduce = true;
  /// step() returns while the first weights travel.
  bool asynchronous = true;

  int units_in_flight() const {
    return max_units_in_flight > 0 ? max_units_in_flight : lookahead + 2;
  }
};

/// The triggers of one pass, as traced.
using Trace = std::vector<Trigger>;

/// One pass: what to issue when its i-th trigger is crossed, and, for a backward, at its end.
struct PassSchedule {
  std::vector<std::vector<Operation>> at;  ///< [triggers]
  std::vector<Operation> end;              ///< before gradients are used, or the next pass
};

/// A whole optimizer step of one rank.
struct StepSchedule {
  PassSchedule forward;
  PassSchedule backward;
  PassSchedule backward_no_sync;  ///< of a micro-step whose gradients stay at the column members
  std::vector<Operation> step;    ///< the update, and publication in forward order

  /// Equal on all ranks whose schedules agree: kUpdate is a rank's own affair and left out.
  std::uint64_t hash() const;
};

/// What a pass issues (the paper, sec:design-schedule and sec:design-pipeline). Deterministic, and
/// the same on every rank. Stage 1 of a unit's weights is issued `lookahead` uses ahead, stage 2
/// one use ahead (without node copies a buffer travels through both stages, so both fill the same
/// window); in a backward the next weights go before this unit's gradients, and at most as many
/// routes are in flight as memory allows, two at most: one in each stage.
///
/// Memory: in a pass whose uses do not nest, packed weights, gradients and inboxes (at most as
/// large as the gradients in flight) fit in units_in_flight() times the largest unit's weights and
/// gradients. Each use that is open while another begins adds a unit; so does a unit that a
/// forward kept, until it is freed, and in a backward one that is used again later, whose gradients
/// wait for its last use.
///
/// @param layout   at least the units that `trace` names.
/// @param trace    kBeforeUse ... kAfterForward or kAfterBackward of each use.
/// @param forward  the training forward's trace where `trace` is a backward's, else `trace` itself:
/// its units have had
///                 stage 1 already.
/// @param sync     false: a backward under no_sync, which sends nothing between nodes.
/// @throws InvalidArgument for options out of range or a unit out of range.
PassSchedule build_pass_schedule(const Layout& layout, const Trace& trace, const Trace& forward,
                                 Pass pass, const Options& options, bool sync = true);

/// What `step()` does: per unit in forward order, the updates that complete this rank's part of it,
/// then its stage 1; the first `lookahead` units, and stage 2 of the first; then the remaining
/// updates.
/// @param batches  [batches of this rank] the units that each touches.
std::vector<Operation> build_update_schedule(const Layout& layout, const Trace& forward,
                                             const std::vector<std::vector<int>>& batches,
                                             const Options& options);

/// All of a step.
StepSchedule build_step_schedule(const Layout& layout, const Trace& forward, const Trace& backward,
                                 const std::vector<std::vector<int>>& batches,
                                 const Options& options);

/// What a trigger issues where no trace is known: everything it needs, in order, and the wait for
/// it.
std::vector<Operation> serve_on_demand(const Layout& layout, Trigger trigger, bool sync = true);

/// @throws InvalidArgument naming the option, what is expected and what came.
void check(const Options& options);

}  // namespace dmuon::schedule
