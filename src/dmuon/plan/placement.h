#pragma once

#include <vector>

#include "dmuon/plan/inventory.h"
#include "dmuon/plan/mesh.h"

namespace dmuon::plan {

/// How many matrices of each shape each slot owns: what the balance decides.
/// Which ones is free, and is what `place` decides.
class Counts {
 public:
  Counts(int num_shapes, int num_slots)
      : num_slots_(num_slots), counts_(static_cast<std::size_t>(num_shapes) * num_slots, 0) {}

  int& at(int shape, int slot) { return counts_[index(shape, slot)]; }
  int at(int shape, int slot) const { return counts_[index(shape, slot)]; }
  int num_slots() const { return num_slots_; }

 private:
  std::size_t index(int shape, int slot) const {
    return static_cast<std::size_t>(shape) * num_slots_ + slot;
  }

  int num_slots_;
  std::vector<int> counts_;  // [num_shapes][num_slots]
};

/// Picks a slot for every matrix so that the matrices of a unit, and neighbours
/// in execution order, sit on different columns as far as the counts allow.
///
/// @param counts for every shape, as many matrices as the inventory has.
/// @return       [num matrices] slot index; slot t owns counts.at(s, t) of shape s.
/// Deterministic; O(num matrices * num slots).
std::vector<int> place(const Inventory& inventory, const ShapeGroups& groups, Counts counts,
                       Mesh mesh);

}  // namespace dmuon::plan
