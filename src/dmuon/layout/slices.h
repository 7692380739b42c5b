#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dmuon/layout/packing.h"
#include "dmuon/layout/parameter.h"

namespace dmuon::layout {

// With tensor parallelism each of the T ranks of a slot has a slice of every matrix. One of them,
// the TP owner, gathers a matrix from all slices, orthogonalises it and scatters the result. These
// functions say which elements a rank has, and where they lie in its memory:
//
//   for (int rank = 0; rank < num_ranks; ++rank) {
//     const Slice slice = slices_of(sizes, views, cut, num_ranks, rank)[parameter];
//     for (const Block& block : slice.blocks)
//       // Copy block.elements, as [matrices, rows, cols], to these matrices, rows and columns.
//   }
//
// Each element of a matrix comes from exactly one rank. One strided copy moves a block, or one for
// each segment of its columns. Most slices have one block. Parameters of one shape may have unequal
// blocks.

/// Tensor parallelism cuts a leaf along one dimension, as Shard(dimension) of a DTensor does: each
/// rank has ceil(size / T) indices. The last ranks may have fewer or none.
///
/// A factor above 1 is the split factor of a _StridedShard: the dimension has so many equal blocks,
/// and each block is cut by itself.
struct Cut {
  int dimension = 0;
  int factor = 1;
};

/// How each leaf is cut. Of a leaf without a cut every rank has all. Empty without tensor
/// parallelism.
using Cuts = core::Vector<core::LeafIndex, std::optional<Cut>>;

/// The same rectangle of several matrices that follow each other in a parameter.
struct Block {
  Segment matrices;  ///< stored ones, with all column blocks side by side
  Segment rows;      ///< of each of the matrices
  Part cols;         ///< of each of the rows
  /// The block's elements in the rank's memory, counted from the slice's first. They are contiguous
  /// as [matrices.size(), rows.size(), cols.size()].
  Segment elements;

  bool operator==(const Block&) const = default;
};

/// The part of a parameter that one rank has: blocks in the order of its memory, without gaps.
struct Slice {
  std::vector<Block> blocks;  ///< none of them empty; no block if the rank has no element

  std::int64_t num_elements() const { return blocks.empty() ? 0 : blocks.back().elements.end; }
  bool operator==(const Slice&) const = default;
};

/// Returns a rank's slice of each parameter of a leaf. Slices follow each other in the rank's local
/// tensor, because the order of local elements is their order in the leaf.
///
/// @param sizes      the leaf's, as the model has it, each >= 1.
/// @param views      those of its parameters, one after the other; they cover the leaf.
/// @param num_ranks  T.
/// @param rank       in [0, num_ranks).
/// @throws InvalidArgument, naming the number, if the cut does not fit the sizes or the ranks.
/// @throws InternalError if views have more or fewer elements than the leaf.
std::vector<Slice> slices_of(const std::vector<std::int64_t>& sizes, const std::vector<View>& views,
                             const Cut& cut, int num_ranks, int rank);

/// Returns the sizes of a rank's local tensor. The cut dimension may be 0.
///
/// @throws InvalidArgument, as slices_of does.
std::vector<std::int64_t> local_sizes(std::vector<std::int64_t> sizes, const Cut& cut,
                                      int num_ranks, int rank);

}  // namespace dmuon::layout
