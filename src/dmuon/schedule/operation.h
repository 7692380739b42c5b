#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "dmuon/core/by_enum.h"
#include "dmuon/core/index.h"
#include "dmuon/layout/layout.h"

namespace dmuon::schedule {

using layout::Layout;
using layout::UnitLayout;

/// An ordered queue of operations that overlaps with the other lanes.
enum class Lane : int {
  kIntra,    ///< messages inside a node: the row
  kInter,    ///< messages between nodes: the column
  kSlices,   ///< messages inside the slot, with tensor parallelism
  kUpdate,   ///< the update of this rank's batches
  kCompute,  ///< the training program itself; an operation here blocks it
};
constexpr int kNumLanes = 5;
constexpr int kNumQueues = 4;  ///< the lanes beside compute, which come first
constexpr core::EachOf<Lane, kNumQueues> kQueues;

template <typename T>
using PerLane = core::ByEnum<Lane, T, kNumLanes>;
template <typename T>
using PerQueue = core::ByEnum<Lane, T, kNumQueues>;

enum class Kind : int {
  // On a batch of this rank, in this order.
  kPrepare,        ///< momentum, direction and norm: what the iteration starts from
  kGather,         ///< slices of directions -> the owner of each matrix: tensor parallelism alone
  kOrthogonalise,  ///< Newton-Schulz
  kScatter,        ///< the owners' results -> slices: tensor parallelism alone
  kApply,          ///< decay and update of the masters
  kFinishUpdate,   ///< compute waits for the batch's apply
  // On a unit.
  kPublishInter,      ///< stage 1: owner's weight -> its column's member on every node
  kPublishIntra,      ///< stage 2: column members -> the packed buffer of every rank of the node
  kAwaitWeights,      ///< compute waits until the packed buffer is filled
  kReshard,           ///< compute: frees the packed buffer of weights
  kRouteIntra,        ///< stage 1: gradients -> the column member's mean; R = 1: the owner's sum
  kRouteInter,        ///< stage 2: the node's mean -> the owner, which accumulates
  kFinishRouteIntra,  ///< compute waits for stage 1 of the unit's route and frees its gradients
  kFinishRouteInter,  ///< compute waits for stage 2 and frees the node's mean
};
constexpr int kNumKinds = 14;
constexpr core::EachOf<Kind, kNumKinds> kKinds;

template <typename T>
using PerKind = core::ByEnum<Kind, T, kNumKinds>;

const char* name_of(Kind kind);
const char* name_of(Lane lane);
Lane lane_of(Kind kind);
/// True if operations of this kind are on a batch, else on a unit. Batches are a slot's own: ranks
/// of other slots issue other operations on them, or none.
inline bool is_on_batch(Kind kind) { return kind <= Kind::kFinishUpdate; }
/// True if the lane carries messages between slots. All ranks issue these operations in one order.
/// Those inside a slot have one order in that slot.
inline bool carries_messages(Lane lane) { return lane == Lane::kIntra || lane == Lane::kInter; }
/// The axis along which a lane's messages travel. @param lane  one that carries messages.
inline layout::Axis axis_of(Lane lane) {
  return lane == Lane::kIntra ? layout::Axis::kRow : layout::Axis::kColumn;
}
inline bool is_publication(Kind kind) {
  return kind == Kind::kPublishInter || kind == Kind::kPublishIntra;
}

/// The unit or batch that an operation is on.
using Subject = std::variant<core::UnitIndex, core::BatchIndex>;

/// The newest operation of `kind` on `subject` that was issued before.
struct Dependency {
  Kind kind{};
  Subject subject;
  bool operator==(const Dependency&) const = default;
};

/// One operation. Issuing it on a lane other than compute does not wait. It begins after everything
/// issued on its lane before, after everything done on the compute lane before, and after the
/// operations that `after` names. A dependency without an issued operation is no wait.
///
/// On a lane that carries messages between slots, those before it have begun, but may still travel;
/// operations are done in order. On another lane those before it are done.
///
/// A Resolver decides which of a schedule's operations run, and which have been done already.
struct Operation {
  Kind kind{};
  Subject subject{};
  /// The version of the weights it sends or changes: 0 before this step's update, 1 after.
  int version = 0;
  /// True if the node's mean stays at the column member, as a partial sum: kRouteIntra alone.
  bool hold = false;
  std::vector<Dependency> after{};

  /// @throws std::bad_variant_access if the operation is on a batch.
  core::UnitIndex unit() const { return std::get<core::UnitIndex>(subject); }
  /// @throws std::bad_variant_access if the operation is on a unit.
  core::BatchIndex batch() const { return std::get<core::BatchIndex>(subject); }
  bool operator==(const Operation&) const = default;
};

/// Prints like "unit 3" and "batch 0".
std::string describe(const Subject& subject);
/// Prints like "publish intra of unit 3".
std::string describe(Kind kind, const Subject& subject);

/// One collective of an operation.
struct Message {
  layout::Axis axis;   ///< of the group
  int root;            ///< member's place in the group: who sends (publish) or receives (route)
  std::int64_t bytes;  ///< payload from or to each other member
  bool operator==(const Message&) const = default;
};

/// Returns the messages that a rank takes part in for an operation, in the order of issue. Empty
/// parts and groups of one send nothing.
std::vector<Message> messages_of(const Operation& operation, const Layout& layout, core::Slot slot);

/// The units that each batch of a rank touches.
using Batches = core::Vector<core::BatchIndex, std::vector<core::UnitIndex>>;

}  // namespace dmuon::schedule
