#pragma once

#include <cstdint>
#include <string>

#include "dmuon/core/index.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/layout/packing.h"

namespace dmuon::layout {

/// A unit as the schedule sees it.
struct UnitLayout {
  std::string name;
  core::Vector<core::Slot, std::int64_t> owner_elements{};  ///< of each owner's part of a buffer
  int weight_size = 4;    ///< bytes of an element of weights as they travel
  int gradient_size = 4;  ///< bytes of an element of gradients as they travel
  /// True if the host framework manages parameters in the unit. All ranks must reach its
  /// collectives alike, so no rank may skip the unit by itself.
  bool host = false;
  /// Elements of a column's part that other columns' ranks do not have: their buffers hold as many
  /// elements of their own there (expert parallelism).
  std::int64_t kept_elements = 0;

  std::int64_t num_elements() const;                  ///< of all owners
  bool empty() const { return num_elements() == 0; }  ///< of parameters that the engine moves
};

/// The unit's elements, from where its parameters lie. Name, sizes and host are the caller's.
UnitLayout unit_layout(const Packing& packing);

/// A mesh, and the units on it.
struct Layout : Mesh {
  core::Vector<core::UnitIndex, UnitLayout> units;

  /// Length of a rank's packed buffer.
  std::int64_t buffer_elements(const UnitLayout& unit) const {
    return unit.num_elements() - (num_shards - 1) * unit.kept_elements;
  }
  /// Elements of a column's part of a unit, the kept ones included.
  std::int64_t column_elements(const UnitLayout& unit, core::Shard column) const;
  /// Bytes of the largest packed buffer of any unit.
  std::int64_t largest_weights() const { return largest_buffer(&UnitLayout::weight_size); }
  std::int64_t largest_gradients() const { return largest_buffer(&UnitLayout::gradient_size); }
  /// Bytes of a column's part of a unit's gradients, which a column member holds between the stages
  /// of a route.
  std::int64_t node_mean(const UnitLayout& unit, core::Shard column) const {
    return column_elements(unit, column) * unit.gradient_size;
  }

 private:
  std::int64_t largest_buffer(int UnitLayout::*element_size) const;
};

}  // namespace dmuon::layout
