#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dmuon/layout/packing.h"
#include "dmuon/wire/owned.h"
#include "dmuon/wire/shared_mesh.h"

namespace dmuon::wire {

/// Elements of parameters whose messages are in flight together; one parameter may have more.
inline constexpr std::int64_t kPieceElements = std::int64_t{1} << 24;

/// Moves what owners hold to all ranks as shards, and back. Checkpoints have this form.
///
///   const Shards shards(&mesh, leaves, parameters, owned, num_chunks);
///   std::vector<at::Tensor> mine = shards.give(which, kMaster, at::kFloat);
///   shards.take(which, kMaster, mine);
///
/// A leaf is cut along its first dimension as fully_shard and torch.chunk cut it. Chunks have
/// ceil(rows / num_chunks) rows; the last ones are smaller or empty. Slot s has chunk
/// s mod num_chunks. So with one chunk a rank of a node, every node has all of them. A named tensor
/// of another shape (Owned::add) is cut at the same rows of the leaf, or by its own rows if it does
/// not have as many (Owned::rows_of).
///
/// Shards travel between an owner and its column's members (between nodes), and between these and
/// their nodes. Each element crosses each kind of link at most once. It goes from its memory to its
/// place; on the way only a column member of another node holds it. There is one message a
/// parameter and rank, in one order on all ranks. Messages of kPieceElements are in flight
/// together, as one launch a stage if the backend can. The calling thread issues all; nothing else
/// may be in flight on the mesh's lanes. Waits end as await_arrival says.
class Shards {
 public:
  /// @param num_chunks  of each leaf. All arguments outlive this.
  Shards(SharedMesh* mesh, const layout::Leaves& leaves, const layout::Parameters& parameters,
         Owned& owned, int num_chunks)
      : mesh_(mesh),
        leaves_(leaves),
        parameters_(parameters),
        owned_(owned),
        num_chunks_(num_chunks) {}

  /// Returns this rank's shards of a named tensor. Collective, with equal arguments.
  /// @param which  leaves, each once.
  /// @param dtype  of the messages and shards; owners cast.
  /// @return       [which] flat, each with memory of its own.
  /// @throws CommError; InvalidArgument for an unknown name before anything is sent.
  std::vector<at::Tensor> give(const std::vector<core::LeafIndex>& which, const std::string& name,
                               at::ScalarType dtype) const;

  /// Writes the shards into the owners' named tensors. Collective. If several nodes have a shard,
  /// the owner's node counts.
  /// @param shards  [which] flat, of any floating dtype and device. Each piece is cast to fp32 on
  ///                the owners' device by itself.
  /// @throws as give().
  void take(const std::vector<core::LeafIndex>& which, const std::string& name,
            const std::vector<at::Tensor>& shards) const;

 private:
  class Cut;
  using Piece = std::vector<Cut>;
  std::vector<Piece> pieces_of(const std::vector<core::LeafIndex>& which,
                               const std::string& name) const;
  using Messages = std::vector<Pending>;
  void send(const Piece& piece, const char* stage, Group* group,
            const std::function<void(std::size_t, Messages*)>& issue) const;
  at::Tensor send_between_nodes(const Cut& cut, const std::string& name, at::ScalarType dtype,
                                Messages* messages) const;

  SharedMesh* mesh_;
  const layout::Leaves& leaves_;
  const layout::Parameters& parameters_;
  Owned& owned_;
  int num_chunks_;
};

}  // namespace dmuon::wire
