#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/core/grid.h"
#include "dmuon/plan/inventory.h"

namespace dmuon::plan {

/// How many matrices of each unit, and of each window of consecutive units, sit on each column.
class Windows {
 public:
  /// @param window units, >= 1.
  Windows(const Inventory& inventory, int num_columns, int window);

  void add(std::size_t matrix, int column, int count);

  int in_unit(std::size_t matrix, int column) const { return counts_(place_[matrix], column); }
  /// In the window that ends with the matrix's unit.
  int in_window(std::size_t matrix, int column) const;

  /// Whether the matrix shares its column within its unit or a window.
  bool repeats(std::size_t matrix, int column) const;

  /// How the sum of squared counts of units and windows changes if two matrices swap columns.
  std::int64_t change_of_swap(std::size_t a, int column_a, std::size_t b, int column_b);
  void swap(std::size_t a, int column_a, std::size_t b, int column_b);

  int length() const { return window_; }  ///< units of a window

 private:
  /// In the window that begins with `unit`.
  int window_count(int unit, int column) const;
  /// Calls `visit` with the count of each window that holds `unit`.
  template <typename Visit>
  void visit_windows(int unit, int column, const Visit& visit) const;
  /// Of `count` matrices more of a unit on a column.
  std::int64_t change(int unit, int column, int count) const;

  std::vector<int> place_;  // [matrices] each one's unit, by the order of first matrices
  int num_units_;
  int window_;              // in [1, num_units]
  core::Grid<int> counts_;  // [units][columns]
};

struct WindowFigures {
  double distinct = 0;
  double repeats = 0;
  double busiest = 0;
};

/// See Spread.
WindowFigures window_figures(const Inventory& inventory, int num_columns,
                             const std::vector<int>& columns, int window);

}  // namespace dmuon::plan
