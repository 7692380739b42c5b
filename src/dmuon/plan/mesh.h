#pragma once

#include <cstdint>

#include "dmuon/core/error.h"

namespace dmuon::plan {

/// R x G slots: R replicates (nodes, slow links between them) of G shards (GPUs of a node, fast
/// links). A 1-D mesh is 1 x G. With tensor parallelism a slot is a group of T ranks.
struct Mesh {
  int num_replicates = 1;
  int num_shards = 1;
  int tensor_parallel = 1;

  int num_slots() const { return num_replicates * num_shards; }

  /// Owners are ranks: rank t of slot s is owner s * T + t, so without tensor parallelism owner and
  /// slot are the same number.
  int num_owners() const { return num_slots() * tensor_parallel; }
  int slot_of(int owner) const { return owner / tensor_parallel; }
  int shard_of(int owner) const { return slot_of(owner) % num_shards; }
  int replicate_of(int owner) const { return slot_of(owner) / num_shards; }
  bool operator==(const Mesh&) const = default;
};

/// One rank's place in the mesh. Ranks of one `shard` form a column, ranks of
/// one `replicate` a row (a node).
struct Slot {
  int replicate = 0;
  int shard = 0;

  bool operator==(const Slot&) const = default;
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

/// @return replicate * num_shards + shard, in [0, num_slots) for a slot of the mesh.
inline int slot_index(Slot slot, Mesh mesh) {
  return slot.replicate * mesh.num_shards + slot.shard;
}

/// The owner that is rank `member` of a slot's tensor-parallel group.
inline int owner_index(Slot slot, int member, Mesh mesh) {
  return slot_index(slot, mesh) * mesh.tensor_parallel + member;
}

/// The inverse of slot_index.
inline Slot slot_at(int index, Mesh mesh) {
  return {index / mesh.num_shards, index % mesh.num_shards};
}

}  // namespace dmuon::plan
