#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "dmuon/layout/packing.h"
#include "dmuon/wire/owned.h"
#include "dmuon/wire/shared_mesh.h"

namespace dmuon::wire {

// What owners hold, as shards on all ranks, and back: the form in which it is saved and loaded.
// A leaf is cut along its first dimension as fully_shard and torch.chunk cut: chunks of
// ceil(rows / num_chunks) rows, the last ones smaller or empty. Slot s has chunk s mod num_chunks:
// with one chunk a rank of a node, every node has all of them.
//
// Owner <-> its column's members (between nodes), these <-> their node: each element crosses each
// kind of link once where it is needed, from the memory where it lies to that where it stays; only
// a column member of another node holds it on the way. One message a parameter and rank, in one
// order on all ranks; those of 64 MB of parameters, or of one larger parameter, are under way
// together. All is done on the calling thread; nothing may be in flight on the mesh's lanes.

class Shards {
 public:
  /// @param num_chunks  of each leaf. All arguments outlive this.
  Shards(SharedMesh* mesh, const layout::Leaves& leaves, const layout::Parameters& parameters,
         const Owned& owned, int num_chunks)
      : mesh_(mesh),
        leaves_(leaves),
        parameters_(parameters),
        owned_(owned),
        num_chunks_(num_chunks) {}

  /// Collective, with equal arguments: this rank's shards of a named tensor.
  /// @param which  leaves, each once.
  /// @param dtype  in which they travel; owners cast.
  /// @returns [which] flat, each with memory of its own.
  /// @throws CommError; InvalidArgument for an unknown name before anything is sent.
  std::vector<at::Tensor> give(const std::vector<core::LeafIndex>& which, const std::string& name,
                               at::ScalarType dtype) const;

  /// Collective: the owners' named tensors take the values of the shards. Of shards that several
  /// nodes hold, those of the owner's node count.
  /// @param shards  [which] flat, of any floating dtype and device; made fp32 on the owners' device
  ///                a piece at a time.
  void take(const std::vector<core::LeafIndex>& which, const std::string& name,
            const std::vector<at::Tensor>& shards) const;

  /// The elements of a leaf that a slot's shard has.
  layout::Segment shard_of(core::LeafIndex leaf, core::Slot slot) const;

 private:
  class Cut;
  using Piece = std::vector<Cut>;
  std::vector<Piece> pieces_of(const std::vector<core::LeafIndex>& which) const;
  at::Tensor send_between_nodes(const Cut& cut, const std::string& name, at::ScalarType dtype,
                                std::vector<Pending>* messages) const;

  SharedMesh* mesh_;
  const layout::Leaves& leaves_;
  const layout::Parameters& parameters_;
  const Owned& owned_;
  int num_chunks_;
};

}  // namespace dmuon::wire
