#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "dmuon/plan/inventory.h"

namespace dmuon::plan {

/// Counts what travels beside a matrix on each place of one kind: a node, or a column.
///
///   Crowding<Replicate> crowding(num_units, mesh.num_replicates, options.lookahead);
///   crowding.add(unit, node, elements);
///   crowding.at(unit, node);  // the lower, the better a place for a matrix of the unit
///
/// A place should have as little as possible of each unit, and of each window of units, because
/// they travel together. The sum of the squares of its elements measures both: over all units, each
/// counted as often as a window has units, and over all windows, those that hang over the ends
/// included. This sum has a term for each pair of matrices on a place: the product of their sizes
/// times weight(distance of their units). So at() is the sum over one matrix of each pair.
template <typename Place>
class Crowding {
 public:
  Crowding(int num_units, int num_places, int window)
      : window_(std::clamp(window, 1, std::min(std::max(num_units, 1), kLongestWindow))),
        sums_(num_units, core::Vector<Place, std::int64_t>(num_places)) {}

  /// Returns how often a pair counts whose units are `distance` apart.
  int weight(int distance) const {
    return std::max(0, window_ - distance) + (distance == 0 ? window_ : 0);
  }

  /// Adds elements of a unit to a place, or removes them if negative. Takes time as the window.
  void add(UnitIndex unit, Place place, std::int64_t elements) {
    const int first = std::max(0, unit.value() - window_ + 1);
    const int last = std::min(sums_.size() - 1, unit.value() + window_ - 1);
    for (int u = first; u <= last; ++u) {
      sums_[UnitIndex(u)][place] += elements * weight(std::abs(u - unit.value()));
    }
  }

  std::int64_t at(UnitIndex unit, Place place) const { return sums_[unit][place]; }

 private:
  // Keeps sums over all elements, at most 2^56, inside 64 bits.
  static constexpr int kLongestWindow = 32;

  int window_;  // units
  core::Vector<UnitIndex, core::Vector<Place, std::int64_t>> sums_;
};

}  // namespace dmuon::plan
