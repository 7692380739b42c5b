#pragma once

#include <cstdint>

#include "dmuon/core/error.h"
#include "dmuon/core/index.h"

namespace dmuon::plan {

using core::Owner;
using core::Replicate;
using core::Shard;
using core::Slot;

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
  Owner owner_at(Replicate replicate, Shard shard, int rank) const {
    return Owner((replicate.value() * num_shards + shard.value()) * tensor_parallel + rank);
  }
  Slot slot_of(Owner owner) const { return Slot(owner.value() / tensor_parallel); }
  Shard shard_of(Owner owner) const { return Shard(slot_of(owner).value() % num_shards); }
  Replicate replicate_of(Owner owner) const {
    return Replicate(slot_of(owner).value() / num_shards);
  }

  core::Indices<Owner> owners() const { return core::Indices<Owner>(num_owners()); }
  core::Indices<Replicate> replicates() const { return core::Indices<Replicate>(num_replicates); }
  core::Indices<Shard> shards() const { return core::Indices<Shard>(num_shards); }
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

}  // namespace dmuon::plan
