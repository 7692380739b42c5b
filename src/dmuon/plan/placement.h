#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/balance/assignment.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/mesh.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

/// How the matrices that travel together are spread over columns, each of which is one path between
/// nodes. A window is `lookahead` consecutive units in execution order, at least one.
struct Spread {
  double distinct_columns = 0;  ///< that a window touches, the mean over windows
  double repeats = 0;           ///< matrices of a window beyond the first on their column, the mean
  double busiest_column = 0;    ///< bytes of a window's busiest column over the mean column's
  double batch_units = 0;       ///< units from a batch's first member to its last, the mean
  std::vector<std::int64_t> column_bytes;  ///< [num_shards] of all weights that cross nodes there

  bool operator==(const Spread&) const = default;
};

/// @param owner [num matrices]. `batch_units` is left 0.
Spread spread(const Inventory& inventory, Mesh mesh, const std::vector<int>& owner,
              const Options& options);

/// Decides which owner of the assignment is which rank, and which matrices it gets: those of a
/// unit, and of a window, fall on columns as different as the counts allow (eq:comm-layout is the
/// ideal); ranks of a column take turns, so nodes rotate.
/// @return [num matrices] owner. Deterministic, by counted work.
std::vector<int> place(const Inventory& inventory, const ShapeGroups& groups,
                       const balance::Assignment& assignment, Mesh mesh, const Options& options);

}  // namespace dmuon::plan
