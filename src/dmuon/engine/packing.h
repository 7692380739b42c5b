#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/plan/inventory.h"

namespace dmuon::engine {

/// A parameter as the engine moves it.
struct Parameter {
  plan::View view;  ///< what is orthogonalised of it
  core::UnitIndex unit;
  core::Slot owner;
  std::vector<std::int64_t> sizes = view.sizes();  ///< as the model has it; as many elements

  std::int64_t num_elements() const { return view.num_elements(); }
};

using Parameters = core::Vector<core::ParameterIndex, Parameter>;

/// Elements [begin, end) of a packed buffer.
struct Segment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const Segment&) const = default;
};

/// A parameter's place in the packed order of its unit.
using PackedIndex = core::Index<struct PackedKind>;

/// Where a unit's parameters lie in its packed buffers. They are sorted by (column, owner, index),
/// so that all of a column travel as one message inside a node, and all of an owner as one message
/// between nodes. Each begins at an aligned element (plan::packed_elements): what lies between has
/// no meaning, and travels with its column and owner.
struct Packing {
  core::Vector<PackedIndex, core::ParameterIndex> parameters;
  core::Vector<PackedIndex, Segment> segments;  ///< what each of them fills
  core::Vector<core::Shard, Segment> columns;   ///< what each column's member of a node holds
  core::Vector<core::Slot, Segment> owners;     ///< what each holds; a column's are adjacent
  std::int64_t num_elements = 0;

  /// [num_replicates] each owner's part of a column, counted from the column's begin.
  std::vector<Segment> parts_of(core::Shard column) const;

  /// @throws InternalError where it is not in the unit.
  PackedIndex place_of(core::ParameterIndex parameter) const;
};

Packing pack(const Parameters& parameters, core::UnitIndex unit, int num_replicates,
             int num_shards);

}  // namespace dmuon::engine
