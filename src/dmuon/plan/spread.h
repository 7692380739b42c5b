#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/layout/mesh.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

/// Bytes of a unit's weights, by where their owners are. A publication sends what the owners of a
/// node have to each other node, a route its gradients the other way.
struct UnitSpread {
  int unit = 0;  ///< the inventory's number
  std::int64_t bytes = 0;
  std::int64_t most_of_node = 0;
  std::int64_t least_of_node = 0;
  std::int64_t most_of_column = 0;  ///< without matrices of single columns

  bool operator==(const UnitSpread&) const = default;
};

/// Measures the spread of matrices that travel together over columns; a column is one path between
/// nodes. Only column_bytes counts the matrices of single columns, which all columns have equally.
/// A window is `lookahead` consecutive units in execution order, at least one.
struct Spread {
  double distinct_columns = 0;  ///< that a window touches, the mean over windows
  double repeats = 0;           ///< matrices of a window beyond the first on their column, the mean
  double busiest_column = 0;    ///< bytes of a window's busiest column over the mean column's
  double batch_units = 0;       ///< units from a batch's first member to its last, the mean
  core::PerShard<std::int64_t> column_bytes;  ///< of all weights that cross nodes there
  std::vector<UnitSpread> units;              ///< in the order of their first matrices

  bool operator==(const Spread&) const = default;
};

/// Computes all members except `batch_units`, which stays 0. Pure function.
Spread spread(const Inventory& inventory, Mesh mesh, const PerParameter<Owner>& owner,
              const PlanOptions& options);

}  // namespace dmuon::plan
