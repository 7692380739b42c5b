#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/plan/inventory.h"

namespace dmuon::engine {

/// A parameter of the plan, and whose it is.
struct Parameter : plan::Parameter {
  core::Slot owner;

  core::UnitIndex unit_index() const { return core::UnitIndex(unit); }
  bool operator==(const Parameter&) const = default;
};

using Parameters = core::Vector<core::ParameterIndex, Parameter>;

/// What a module sees and autograd gives one gradient: of one parameter, or of several that follow
/// each other.
struct Leaf {
  core::UnitIndex unit;
  std::vector<core::ParameterIndex> parameters;
  std::vector<std::int64_t> sizes;  ///< as the model has it
  int num_columns = 1;  ///< of which each has an equal part of the first dimension; 1: all of it

  /// As a rank's module sees it.
  std::vector<std::int64_t> local_sizes() const;
};

using Leaves = core::Vector<core::LeafIndex, Leaf>;
using LeafSizes = core::Vector<core::LeafIndex, std::vector<std::int64_t>>;

/// @param sizes  of all leaves, with as many elements as their parameters; none: those of views.
/// @throws InternalError where they do not fit, and for a parameter that continues none of its
/// unit.
Leaves leaves_of(const Parameters& parameters, const LeafSizes& sizes = {});

/// Elements [begin, end) of a buffer.
struct Segment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const Segment&) const = default;
};

/// What a rank has of a packed buffer: segments, in the rank's own order, of which none is empty.
struct Part {
  std::vector<Segment> segments;

  std::int64_t size() const;
  /// The element of the buffer that is the part's at `place` in [0, size()).
  std::int64_t element_at(std::int64_t place) const;
  /// What follows the last segment makes it longer.
  void append(const Segment& segment);
  bool operator==(const Part&) const = default;
};

/// A parameter's place in the packed order of its unit.
using PackedIndex = core::Index<struct PackedKind>;
/// A leaf's place in the packed order of its unit.
using PackedLeafIndex = core::Index<struct PackedLeafKind>;

/// Where a unit's parameters lie in its packed buffers. Leaves are sorted by (column, owner,
/// index), so that all of a column travel as one message inside a node, and all of an owner as one
/// message between nodes; those whose parameters have several owners come last, and add a message
/// for each run of one owner's. Each leaf begins at an aligned element (plan::packed_elements):
/// what lies between has no meaning, and travels with what is before it.
///
/// Where a leaf is cut between the columns, each rank has its own column's part, and these lie in
/// the same place: what is another column's is not there.
///
/// A column has buffers of its own too (node copies, nodes' means): what its member of a node
/// holds, owner by owner; after what travels inside the node, what does not.
struct Packing {
  core::Vector<PackedLeafIndex, core::LeafIndex> leaves;
  core::Vector<PackedLeafIndex, std::int64_t> leaf_begins;  ///< where each begins
  core::Vector<PackedIndex, core::ParameterIndex> parameters;
  core::Vector<PackedIndex, PackedLeafIndex> leaf_of;
  core::Vector<PackedIndex, bool> is_kept;           ///< in its column
  core::Vector<PackedIndex, Segment> segments;       ///< what each of them fills
  core::Vector<PackedIndex, core::Shard> column_of;  ///< its owner's
  core::Vector<PackedIndex, Segment> in_column;      ///< what it fills of its column's buffers
  core::Vector<core::Shard, Part> columns;           ///< what each column's member gives its node
  core::Vector<core::Shard, Part> kept;              ///< what each keeps, as no other has it
  core::Vector<core::Slot, Part> owners;             ///< what each holds, that last
  core::Vector<core::Slot, std::int64_t> kept_by;    ///< elements of it that its column keeps
  std::int64_t num_elements = 0;

  /// The length of a column's buffers.
  std::int64_t column_elements(core::Shard column) const {
    return columns[column].size() + kept[column].size();
  }

  /// [num_replicates] each owner's part of a column's buffers.
  std::vector<Part> parts_of(core::Shard column) const;
  /// [num_replicates] of the packed buffer itself.
  std::vector<Part> owners_of(core::Shard column) const;

  /// @throws InternalError where it is not in the unit.
  PackedIndex place_of(core::ParameterIndex parameter) const;
  PackedLeafIndex place_of(core::LeafIndex leaf) const;
};

Packing pack(const Parameters& parameters, core::UnitIndex unit, int num_replicates,
             int num_shards);

}  // namespace dmuon::engine
