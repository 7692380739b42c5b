#pragma once

#include "dmuon/schedule/operation.h"

namespace dmuon::simulate {

/// A rank's group for a message, numbered as MessageId says, and its place there. Member i is rank
/// first + i * stride.
struct Membership {
  int group;
  int member;
  int size;
  int first;
  int stride;
};

inline int num_groups(const layout::Mesh& mesh) {
  const int along = mesh.num_replicates + mesh.num_shards;
  return mesh.tensor_parallel * along + mesh.num_slots();
}

inline Membership membership(const layout::Mesh& mesh, core::Owner rank, schedule::Lane lane,
                             const schedule::Message& message) {
  const core::Slot slot = mesh.slot_of(rank);
  const int num_ranks = mesh.tensor_parallel;
  const int tensor_rank = rank.value() % num_ranks;
  const int along = mesh.num_replicates + mesh.num_shards;
  if (lane == schedule::Lane::kSlices) {
    return {num_ranks * along + slot.value(), tensor_rank, num_ranks, slot.value() * num_ranks, 1};
  }
  const bool in_row = message.axis == layout::Axis::kRow;
  const int group =
      in_row ? mesh.replicate_of(slot).value() : mesh.num_replicates + mesh.shard_of(slot).value();
  const int first = mesh.slot_of(slot, message.axis, 0).value() * num_ranks + tensor_rank;
  return {tensor_rank * along + group, mesh.member_of(slot, message.axis), mesh.size(message.axis),
          first, in_row ? num_ranks : mesh.num_shards * num_ranks};
}

}  // namespace dmuon::simulate
