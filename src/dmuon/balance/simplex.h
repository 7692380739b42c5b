#pragma once

#include <cstddef>
#include <vector>

namespace dmuon::balance {

/// min sum x  subject to  A x >= 1, x >= 0, for few rows and columns that come one by one.
/// A dense revised simplex. It serves a search whose results are proved otherwise, so it may give
/// up: a wrong digit costs quality, never truth. Only + - * / are used, in a fixed order: equal
/// steps on every machine that does not contract them.
class Simplex {
 public:
  explicit Simplex(int num_rows);

  /// @param column [rows] >= 0. @return its index.
  int add(std::vector<double> column);

  /// Begins at a basis: basis[row] is a column, or kSurplus for the row's own surplus.
  /// @return whether the basis is feasible.
  bool start(const std::vector<int>& basis);
  static constexpr int kSurplus = -1;

  enum class Step { kMoved, kOptimal, kGaveUp };

  /// One pivot towards the optimum over the known columns.
  Step step();

  double value() const;
  double x(int column) const;
  /// [rows] >= 0 at an optimum.
  const std::vector<double>& duals() const { return duals_; }

 private:
  using Vector = std::vector<double>;

  bool refactor();
  void update_duals();
  int entering() const;
  int leaving(const Vector& direction) const;
  void pivot(int row, const Vector& direction, int entering);

  std::size_t num_rows_;
  std::vector<Vector> columns_;
  std::vector<int> basis_;       // [rows] column, or -1 - row of a surplus
  std::vector<Vector> inverse_;  // [rows][rows] of the basis
  Vector values_;                // [rows] of the basic variables
  Vector duals_;                 // [rows]
  int num_pivots_ = 0;
};

}  // namespace dmuon::balance
