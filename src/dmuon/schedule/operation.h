#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/core/index.h"

namespace dmuon::schedule {

/// An ordered queue of operations that overlaps with the other lanes.
enum class Lane : int {
  kCompute,  ///< the training program itself; an operation here blocks it
  kIntra,    ///< messages inside a node: the row
  kInter,    ///< messages between nodes: the column
};
constexpr int kNumLanes = 3;

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

/// A unit as the schedule sees it.
struct UnitLayout {
  std::string name;
  core::Vector<core::Slot, std::int64_t> owner_elements{};  ///< of each owner's part of a buffer
  int weight_size = 4;    ///< bytes of an element of weights as they travel
  int gradient_size = 4;  ///< likewise of gradients
  /// The host framework manages parameters in it, whose collectives all ranks must reach alike: no
  /// rank may skip it by itself.
  bool host = false;
  /// How much of a column's part other columns' ranks do not have: their buffers hold as much of
  /// their own there (expert parallelism).
  std::int64_t kept_elements = 0;

  std::int64_t num_elements() const;                  ///< of all owners
  bool empty() const { return num_elements() == 0; }  ///< of what the engine moves
};

/// A mesh of R replicates (nodes) of G shards, and the units on it.
struct Layout {
  int num_replicates = 1;
  int num_shards = 1;
  core::Vector<core::UnitIndex, UnitLayout> units;

  int num_slots() const { return num_replicates * num_shards; }
  bool has_inter() const { return num_replicates > 1; }
  core::Slot slot_of(core::Replicate replicate, core::Shard shard) const {
    return core::Slot(replicate.value() * num_shards + shard.value());
  }
  core::Replicate replicate_of(core::Slot slot) const {
    return core::Replicate(slot.value() / num_shards);
  }
  core::Shard shard_of(core::Slot slot) const { return core::Shard(slot.value() % num_shards); }

  /// The length of a rank's packed buffer.
  std::int64_t buffer_elements(const UnitLayout& unit) const {
    return unit.num_elements() - (num_shards - 1) * unit.kept_elements;
  }
  /// Bytes of the largest packed buffer of any unit.
  std::int64_t largest_weights() const { return largest_buffer(&UnitLayout::weight_size); }
  std::int64_t largest_gradients() const { return largest_buffer(&UnitLayout::gradient_size); }
  /// Bytes of the largest part that a column has of any unit's gradients: what a column member
  /// keeps of a route between the stages.
  std::int64_t largest_node_mean() const;

 private:
  std::int64_t largest_buffer(int UnitLayout::*element_size) const;
};

/// One collective of an operation.
struct Message {
  enum class Group : int { kRow, kColumn } group;
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
