#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/layout/parameter.h"

namespace dmuon::layout {

/// A tensor that a module sees and autograd gives one gradient. It consists of one parameter, or of
/// several that follow each other.
struct Leaf {
  core::UnitIndex unit;
  std::vector<core::ParameterIndex> parameters;
  std::vector<std::int64_t> sizes;  ///< as the model has it
  int num_columns = 1;  ///< each has an equal part of the first dimension; 1: each has all of it

  /// The sizes that a rank's module sees.
  std::vector<std::int64_t> local_sizes() const;
};

using Leaves = core::Vector<core::LeafIndex, Leaf>;
using LeafSizes = core::Vector<core::LeafIndex, std::vector<std::int64_t>>;

/// @param sizes  of all leaves, with as many elements as their parameters; none: those of views.
/// @throws InternalError if they do not fit, or if a parameter continues none of its unit.
Leaves leaves_of(const Parameters& parameters, const LeafSizes& sizes = {});

/// Elements [begin, end) of a buffer.
struct Segment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const Segment&) const = default;
};

/// The elements that two segments share; empty if there are none.
Segment overlap(const Segment& a, const Segment& b);

/// A rank's part of a packed buffer or of a row: segments in the rank's own order, none empty.
struct Part {
  std::vector<Segment> segments;

  std::int64_t size() const;
  /// The element of the buffer at `place` of the part, in [0, size()).
  std::int64_t element_at(std::int64_t place) const;
  /// A segment that follows the last one makes that one longer.
  void append(const Segment& segment);
  bool operator==(const Part&) const = default;
};

/// A parameter's place in the packed order of its unit.
using PackedIndex = core::Index<struct PackedKind>;
/// A leaf's place in the packed order of its unit.
using PackedLeafIndex = core::Index<struct PackedLeafKind>;

struct PackedLeaf {
  core::LeafIndex index;
  std::int64_t begin = 0;  ///< its first element in the buffer
  bool operator==(const PackedLeaf&) const = default;
};

struct PackedParameter {
  core::ParameterIndex index;
  PackedLeafIndex leaf;
  bool is_kept = false;  ///< only its column has it (expert parallelism)
  Segment in_unit;       ///< its elements in the unit's buffers
  core::Shard column;    ///< its owner's
  Segment in_column;     ///< its elements in the column's buffers
};

/// Where a unit's parameters lie in its packed buffers.
///
/// Leaves are sorted by (column, owner, index). So a column's leaves are one message inside a node,
/// and an owner's leaves are one message between nodes. Leaves of several owners come last; they
/// add a message for each run of one owner's parameters. Each leaf begins at an aligned element
/// (packed_elements). The gap after a leaf has no meaning and travels with the leaf before it.
///
/// With padding, gaps make the parts of all owners equal, or else the parts of all columns. So one
/// all-gather or reduce-scatter replaces a message for each part (equal_parts). That is if gaps are
/// at most an eighth of the leaves, every part has a leaf, and every leaf has one owner.
///
/// Of a leaf that is cut between the columns each rank has its own column's part only. These parts
/// lie in the same place of every rank's buffer.
///
/// A column has buffers of its own (node copies, nodes' means). They hold the parts that a column
/// member of a node holds, owner by owner: first the parts that travel inside the node, then the
/// kept ones.
struct Packing {
  core::Vector<PackedLeafIndex, PackedLeaf> leaves;
  core::Vector<PackedIndex, PackedParameter> parameters;
  core::Vector<core::Shard, Part> columns;  ///< each column member sends this part to its node
  core::Vector<core::Shard, Part> kept;     ///< each column keeps this part for itself
  core::Vector<core::Slot, Part> owners;    ///< each owner's part, its kept elements last
  core::Vector<core::Slot, std::int64_t> kept_by;  ///< kept elements of each owner's part
  std::int64_t num_elements = 0;                   ///< length of the unit's buffers

  bool empty() const { return parameters.empty(); }

  /// Length of a column's buffers.
  std::int64_t column_elements(core::Shard column) const {
    return columns[column].size() + kept[column].size();
  }

  /// [num_replicates] each owner's part of a column's buffers.
  std::vector<Part> parts_of(core::Shard column) const;
  /// [num_replicates] each owner's part of the unit's buffers.
  std::vector<Part> owners_of(core::Shard column) const;

  /// @throws InternalError if the unit has no such leaf.
  PackedLeafIndex place_of(core::LeafIndex leaf) const;
};

/// @param leaves  leaves_of(parameters).
/// @param mesh    one that the owners fit.
/// @param pads    True on accelerators. On CPUs ranks send parts as they are.
Packing pack(const Parameters& parameters, const Leaves& leaves, core::UnitIndex unit,
             const Mesh& mesh, bool pads);

/// True if part g is the g-th of equal divisions of a buffer with this many elements.
bool equal_parts(const std::vector<Part>& parts, std::int64_t num_elements);

}  // namespace dmuon::layout
