#pragma once

#include <cstdint>
#include <string>
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
  kCompute,  ///< the training program itself; an operation here blocks it
};
constexpr int kNumLanes = 3;
constexpr int kNumQueues = 2;  ///< the lanes beside compute, which come first
constexpr core::EachOf<Lane, kNumQueues> kQueues;

template <typename T>
using PerLane = core::ByEnum<Lane, T, kNumLanes>;
template <typename T>
using PerQueue = core::ByEnum<Lane, T, kNumQueues>;

enum class Kind : int {
  kUpdate,            ///< compute: momentum, Newton-Schulz, new masters of a batch of this rank
  kPublishInter,      ///< stage 1: owner's weight -> its column's member on every node
  kPublishIntra,      ///< stage 2: column members -> the packed buffer of every rank of the node
  kAwaitWeights,      ///< compute waits until the packed buffer is filled
  kForward,           ///< compute: the module reads its weights (no schedule holds it)
  kBackward,          ///< compute: the module reads its weights, writes its gradients (likewise)
  kReshard,           ///< compute: frees the packed buffer of weights
  kRouteIntra,        ///< stage 1: gradients -> the column member's mean; R = 1: the owner's sum
  kRouteInter,        ///< stage 2: the node's mean -> the owner, which accumulates
  kFinishRouteIntra,  ///< compute waits for stage 1 of the unit's route and frees its gradients
  kFinishRouteInter,  ///< compute waits for stage 2 and frees the node's mean
};
constexpr int kNumKinds = 11;
constexpr core::EachOf<Kind, kNumKinds> kKinds;

template <typename T>
using PerKind = core::ByEnum<Kind, T, kNumKinds>;

const char* name_of(Kind kind);
const char* name_of(Lane lane);
Lane lane_of(Kind kind);
inline bool is_publication(Kind kind) {
  return kind == Kind::kPublishInter || kind == Kind::kPublishIntra;
}

/// The newest operation of `kind` on `unit` that was issued before.
struct Dependency {
  Kind kind{};
  core::UnitIndex unit;
  bool operator==(const Dependency&) const = default;
};

/// One operation. Issuing it on a lane of communication does not wait; it runs after everything
/// issued on its lane before, after everything done on the compute lane before, and after what
/// `after` names. A kReshard waits for nothing where nothing of that kind was issued.
///
/// Which of a schedule's operations run, and which have been done already, a Resolver says.
struct Operation {
  Kind kind{};
  core::UnitIndex unit{};    ///< but for kUpdate, which has a batch instead
  core::BatchIndex batch{};  ///< kUpdate's
  /// Which weights it moves, counted from those that the step began with: 1 after the update.
  int version = 0;
  /// Whether the node's mean stays at the column member, as a partial sum: kRouteIntra alone.
  bool hold = false;
  std::vector<Dependency> after{};
  bool operator==(const Operation&) const = default;
};

/// One collective of an operation.
struct Message {
  layout::Axis axis;   ///< of the group
  int root;            ///< member's place in the group: who sends (publish) or receives (route)
  std::int64_t bytes;  ///< payload from or to each other member
  bool operator==(const Message&) const = default;
};

/// What a rank sends and receives for an operation, in the order of issue. Empty parts and groups
/// of one send nothing.
std::vector<Message> messages_of(const Operation& operation, const Layout& layout, core::Slot slot);

/// The units that each batch of a rank touches.
using Batches = core::Vector<core::BatchIndex, std::vector<core::UnitIndex>>;

}  // namespace dmuon::schedule
