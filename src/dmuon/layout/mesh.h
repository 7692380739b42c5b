#pragma once

#include <cstdint>

#include "dmuon/core/by_enum.h"
#include "dmuon/core/error.h"
#include "dmuon/core/index.h"

namespace dmuon::layout {

/// The dimensions of a mesh along which ranks form groups.
enum class Axis : int {
  kRow,     ///< the ranks of one node; members by shard
  kColumn,  ///< the ranks of one shard index; members by replicate
};
constexpr int kNumAxes = 2;

template <typename T>
using PerAxis = core::ByEnum<Axis, T, kNumAxes>;

/// R x G slots: R replicates (nodes, slow links between them) of G shards (GPUs of a node, fast
/// links). A 1-D mesh is 1 x G. With tensor parallelism a slot is a group of T ranks.
///
/// The one place of the arithmetic between slots, replicates, shards and owners.
struct Mesh {
  int num_replicates = 1;
  int num_shards = 1;
  int tensor_parallel = 1;

  int num_slots() const { return num_replicates * num_shards; }
  bool has_inter() const { return num_replicates > 1; }
  core::Slot slot_at(core::Replicate replicate, core::Shard shard) const {
    return core::Slot(replicate.value() * num_shards + shard.value());
  }
  core::Replicate replicate_of(core::Slot slot) const {
    return core::Replicate(slot.value() / num_shards);
  }
  core::Shard shard_of(core::Slot slot) const { return core::Shard(slot.value() % num_shards); }

  /// Number of members of a group along an axis.
  int size(Axis axis) const { return axis == Axis::kRow ? num_shards : num_replicates; }
  /// The slot's place in its group along an axis.
  int member_of(core::Slot slot, Axis axis) const {
    return axis == Axis::kRow ? shard_of(slot).value() : replicate_of(slot).value();
  }
  /// The slot of a member of the group of `slot` along an axis.
  core::Slot slot_of(core::Slot slot, Axis axis, int member) const {
    return axis == Axis::kRow ? slot_at(replicate_of(slot), core::Shard(member))
                              : slot_at(core::Replicate(member), shard_of(slot));
  }

  /// Owners are ranks: rank t of slot s is owner s * T + t. Without tensor parallelism an owner and
  /// its slot are the same number.
  int num_owners() const { return num_slots() * tensor_parallel; }
  core::Owner owner_at(core::Replicate replicate, core::Shard shard, int rank) const {
    return core::Owner(slot_at(replicate, shard).value() * tensor_parallel + rank);
  }
  core::Slot slot_of(core::Owner owner) const {
    return core::Slot(owner.value() / tensor_parallel);
  }
  core::Shard shard_of(core::Owner owner) const { return shard_of(slot_of(owner)); }
  core::Replicate replicate_of(core::Owner owner) const { return replicate_of(slot_of(owner)); }

  core::Indices<core::Owner> owners() const { return core::Indices<core::Owner>(num_owners()); }
  core::Indices<core::Slot> slots() const { return core::Indices<core::Slot>(num_slots()); }
  core::Indices<core::Replicate> replicates() const {
    return core::Indices<core::Replicate>(num_replicates);
  }
  core::Indices<core::Shard> shards() const { return core::Indices<core::Shard>(num_shards); }
  bool operator==(const Mesh&) const = default;
};

/// Far above any machine; keeps every count and index of ranks inside an int.
inline constexpr std::int64_t kMaxSlots = std::int64_t{1} << 20;

/// @throws InvalidArgument unless all sides are >= 1 and there are at most kMaxSlots ranks.
inline void validate(Mesh mesh) {
  core::require(mesh.num_replicates >= 1, "Mesh: num_replicates must be >= 1; got ",
                mesh.num_replicates);
  core::require(mesh.num_shards >= 1, "Mesh: num_shards must be >= 1; got ", mesh.num_shards);
  core::require(mesh.tensor_parallel >= 1, "Mesh: tensor_parallel must be >= 1; got ",
                mesh.tensor_parallel);
  const auto num_slots = std::int64_t{mesh.num_replicates} * mesh.num_shards;
  core::require(num_slots <= kMaxSlots && mesh.tensor_parallel <= kMaxSlots / num_slots,
                "Mesh: num_replicates * num_shards * tensor_parallel must be <= ", kMaxSlots,
                "; got ", mesh.num_replicates, " * ", mesh.num_shards, " * ", mesh.tensor_parallel);
}

}  // namespace dmuon::layout
