#pragma once

#include <cstdint>

#include "dmuon/core/error.h"

namespace dmuon::plan {

/// R x G ranks: R replicates (nodes, slow links between them) of G shards
/// (GPUs of a node, fast links). A 1-D mesh is 1 x G.
struct Mesh {
  int num_replicates = 1;
  int num_shards = 1;

  int num_slots() const { return num_replicates * num_shards; }
  bool operator==(const Mesh&) const = default;
};

/// One rank's place in the mesh. Ranks of one `shard` form a column, ranks of
/// one `replicate` a row (a node).
struct Slot {
  int replicate = 0;
  int shard = 0;

  bool operator==(const Slot&) const = default;
};

/// Far above any machine; keeps every slot count and index inside an int.
inline constexpr std::int64_t kMaxSlots = std::int64_t{1} << 20;

/// @throws InvalidArgument unless both sides are >= 1 and there are at most kMaxSlots slots.
inline void validate(Mesh mesh) {
  core::require(mesh.num_replicates >= 1, "Mesh: num_replicates must be >= 1; got ",
                mesh.num_replicates);
  core::require(mesh.num_shards >= 1, "Mesh: num_shards must be >= 1; got ", mesh.num_shards);
  const auto num_slots = std::int64_t{mesh.num_replicates} * mesh.num_shards;
  core::require(num_slots <= kMaxSlots, "Mesh: num_replicates * num_shards must be <= ", kMaxSlots,
                "; got ", num_slots);
}

/// @return replicate * num_shards + shard, in [0, num_slots) for a slot of the mesh.
inline int slot_index(Slot slot, Mesh mesh) {
  return slot.replicate * mesh.num_shards + slot.shard;
}

/// The inverse of slot_index.
inline Slot slot_at(int index, Mesh mesh) {
  return {index / mesh.num_shards, index % mesh.num_shards};
}

}  // namespace dmuon::plan
