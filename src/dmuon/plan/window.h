#pragma once

#include <cstdint>

#include "dmuon/plan/inventory.h"
#include "dmuon/plan/mesh.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

/// How many matrices of each unit, and of each window of consecutive units, sit on each column.
class Windows {
 public:
  /// @param window units, >= 1.
  Windows(const Inventory& inventory, int num_columns, int window);

  void add(ParameterIndex matrix, Shard column, int count);

  int in_unit(ParameterIndex matrix, Shard column) const {
    return counts_[unit_of_[matrix]][column];
  }
  /// In the window that ends with the matrix's unit.
  int in_window(ParameterIndex matrix, Shard column) const;

  /// Whether the matrix shares its column within its unit or a window.
  bool repeats(ParameterIndex matrix, Shard column) const;

  /// How the sum of squared counts of units and windows changes if two matrices swap columns.
  std::int64_t change_of_swap(ParameterIndex a, Shard column_a, ParameterIndex b, Shard column_b);
  void swap(ParameterIndex a, Shard column_a, ParameterIndex b, Shard column_b);

  int length() const { return window_; }  ///< units of a window

 private:
  /// 0 where there is no such unit.
  int count(int unit, Shard column) const;
  /// In the window that begins with `unit`.
  int window_count(int unit, Shard column) const;
  /// Calls `visit` with the count of each window that holds the matrix's unit.
  template <typename Visit>
  void visit_windows(ParameterIndex matrix, Shard column, const Visit& visit) const;
  /// Adds, and returns how the sum changes.
  std::int64_t change_of_add(ParameterIndex matrix, Shard column, int count);

  PerParameter<UnitIndex> unit_of_;  // numbered by the order of first matrices
  core::Vector<UnitIndex, core::PerShard<int>> counts_;
  int window_;  // in [1, number of units]
};

/// How the matrices that travel together are spread over columns, each of which is one path between
/// nodes. A window is `lookahead` consecutive units in execution order, at least one.
struct Spread {
  double distinct_columns = 0;  ///< that a window touches, the mean over windows
  double repeats = 0;           ///< matrices of a window beyond the first on their column, the mean
  double busiest_column = 0;    ///< bytes of a window's busiest column over the mean column's
  double batch_units = 0;       ///< units from a batch's first member to its last, the mean
  core::PerShard<std::int64_t> column_bytes;  ///< of all weights that cross nodes there

  bool operator==(const Spread&) const = default;
};

/// `batch_units` is left 0.
Spread spread(const Inventory& inventory, Mesh mesh, const PerParameter<Owner>& owner,
              const Options& options);

}  // namespace dmuon::plan
