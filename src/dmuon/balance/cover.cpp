#include "dmuon/balance/cover.h"

#include <cstddef>
#include <numeric>
#include <utility>

namespace dmuon::balance {
namespace {

constexpr double kTolerance = 1e-9;
constexpr double kTie = 1e-12;
constexpr int kMaxPivots = 1000;  // cycling is possible in theory

// Tucker's tableau of the dual program: max sum prices subject to patterns * prices <= 1. Its last
// column holds the values of the variables of the rows, its last row minus those of the columns.
class Tableau {
 public:
  explicit Tableau(const std::vector<std::vector<double>>& patterns)
      : cells_(patterns), of_row_(patterns.size()), of_column_(patterns.front().size()) {
    for (std::vector<double>& row : cells_) row.push_back(1);
    cells_.emplace_back(of_column_.size(), -1).push_back(0);
    std::iota(of_column_.begin(), of_column_.end(), 0);
    std::iota(of_row_.begin(), of_row_.end(), of_column_.size());
  }

  bool solve() {
    for (int i = 0; i < kMaxPivots; ++i) {
      const std::size_t column = entering();
      if (column == of_column_.size()) return true;
      const std::size_t row = leaving(column);
      if (row == of_row_.size()) return false;
      pivot(row, column);
    }
    return false;
  }

  Cover cover() const {
    Cover found{std::vector<double>(of_row_.size(), 0), std::vector<double>(of_column_.size(), 0)};
    for (std::size_t i = 0; i < of_row_.size(); ++i) {
      if (of_row_[i] < of_column_.size()) found.prices[of_row_[i]] = cells_[i].back();
    }
    for (std::size_t j = 0; j < of_column_.size(); ++j) {
      if (of_column_[j] < of_column_.size()) continue;
      found.amounts[of_column_[j] - of_column_.size()] = cells_.back()[j];
    }
    return found;
  }

 private:
  // Returns the column that gains most, or the number of columns if none gains.
  std::size_t entering() const {
    std::size_t best = of_column_.size();
    double least = -kTolerance;
    for (std::size_t j = 0; j < of_column_.size(); ++j) {
      if (cells_.back()[j] >= least) continue;
      least = cells_.back()[j];
      best = j;
    }
    return best;
  }

  // Returns the row that reaches 0 first; among equals the one with the largest pivot.
  std::size_t leaving(std::size_t column) const {
    std::size_t best = of_row_.size();
    double least = 0;
    for (std::size_t i = 0; i < of_row_.size(); ++i) {
      const double entry = cells_[i][column];
      if (entry <= kTolerance) continue;
      const double ratio = cells_[i].back() / entry;
      if (best < of_row_.size()) {
        if (ratio > least + kTie) continue;
        if (ratio >= least - kTie && entry <= cells_[best][column]) continue;
      }
      best = i;
      least = ratio;
    }
    return best;
  }

  void pivot(std::size_t row, std::size_t column) {
    const double divisor = cells_[row][column];
    cells_[row][column] = 1;
    for (double& entry : cells_[row]) entry /= divisor;
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      const double factor = cells_[i][column];
      if (i == row || factor == 0) continue;
      cells_[i][column] = 0;
      for (std::size_t j = 0; j < cells_[i].size(); ++j) cells_[i][j] -= factor * cells_[row][j];
    }
    std::swap(of_row_[row], of_column_[column]);
  }

  std::vector<std::vector<double>> cells_;
  std::vector<std::size_t> of_row_;     // variable: a kind's price, or [kinds] + a pattern's slack
  std::vector<std::size_t> of_column_;  // likewise
};

}  // namespace

Cover cheapest_cover(const std::vector<std::vector<double>>& patterns) {
  if (patterns.empty()) return {};
  Tableau tableau(patterns);
  return tableau.solve() ? tableau.cover() : Cover{};
}

}  // namespace dmuon::balance
