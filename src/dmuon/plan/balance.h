#pragma once

#include <vector>

#include "dmuon/plan/cost.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/mesh.h"
#include "dmuon/plan/placement.h"

namespace dmuon::plan {

/// Seconds that no assignment to `num_slots` slots can undercut; see balance.cpp for the argument.
/// @param costs one entry a shape of `groups`, each good for all its matrices.
double lower_bound_seconds(const ShapeGroups& groups, const CostTable& costs, int num_slots);

/// @return [S] for each shape the most matrices that take at most `seconds`, at least 1.
std::vector<int> piece_sizes(const ShapeGroups& groups, const CostTable& costs, double seconds);

/// How many matrices of each shape every slot owns, and what that takes.
/// A slot runs its matrices of one shape as the cheapest set of batches, so a
/// further matrix costs it best_seconds(k + 1) - best_seconds(k).
/// Deterministic: limits count operations, never time. Refers to `costs`.
class Balance {
 public:
  Balance(const CostTable& costs, Mesh mesh);

  /// Greedy: cuts every shape into pieces of piece_sizes[s] >= 1 matrices and a
  /// rest, then, heaviest piece first, gives each to the slot that ends least
  /// loaded. Ties go to the first slot in the order of eq:comm-layout, counted
  /// from the piece's own place.
  /// With single matrices whose batches gain nothing this is LPT: makespan
  /// <= (4/3 - 1/(3 num_slots)) * optimum (Graham 1969).
  void deal(const ShapeGroups& groups, const std::vector<int>& piece_sizes);

  /// Local search: while it helps, the best move (one matrix, or all of a
  /// shape) from the slowest slot, or swap of one matrix with another slot's.
  /// The makespan never grows.
  void improve();

  double makespan_seconds() const;
  const Counts& counts() const { return counts_; }

 private:
  // One shape's `num_given` matrices go from one slot to another, for one matrix of shape `taken`,
  // or for nothing if `taken` is negative.
  struct Exchange {
    int to = -1;
    int given = -1;
    int num_given = 0;
    int taken = -1;
  };

  double seconds(int shape, int k) const { return (*costs_)[shape].best_seconds(k); }
  double change(int shape, int slot, int added) const;
  void add(int shape, int slot, int added);
  void consider(int from, const Exchange& exchange, Exchange& best, double& best_seconds) const;
  Exchange best_exchange(int from, int& num_tries) const;
  void refresh(int slot);

  const CostTable* costs_;
  Counts counts_;
  std::vector<double> loads_;             // [num_slots] seconds
  std::vector<std::vector<int>> shapes_;  // [num_slots] shapes present, ascending; kept by improve
  std::vector<int> layout_order_;         // [num_slots] slots in the order of eq:comm-layout
};

}  // namespace dmuon::plan
