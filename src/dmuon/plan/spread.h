#pragma once

#include <cstdint>

#include "dmuon/layout/mesh.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

/// Measures the spread of matrices that travel together over columns; a column is one path between
/// nodes. Only column_bytes counts the matrices of single columns, which all columns have equally.
/// A window is `lookahead` consecutive units in execution order, at least one.
struct Spread {
  double distinct_columns = 0;  ///< that a window touches, the mean over windows
  double repeats = 0;           ///< matrices of a window beyond the first on their column, the mean
  double busiest_column = 0;    ///< bytes of a window's busiest column over the mean column's
  double batch_units = 0;       ///< units from a batch's first member to its last, the mean
  core::PerShard<std::int64_t> column_bytes;  ///< of all weights that cross nodes there

  bool operator==(const Spread&) const = default;
};

/// Computes all members except `batch_units`, which stays 0. Pure function.
Spread spread(const Inventory& inventory, Mesh mesh, const PerParameter<Owner>& owner,
              const PlanOptions& options);

}  // namespace dmuon::plan
