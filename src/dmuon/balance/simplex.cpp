#include "dmuon/balance/simplex.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace dmuon::balance {
namespace {

constexpr double kTolerance = 1e-9;  // of reduced costs and pivots
constexpr double kSingular = 1e-13;
constexpr int kRefactorEvery = 40;  // pivots; rounding errors grow with them
constexpr int kMaxPivots = 5000;    // cycling is possible in theory
constexpr int kNone = 1 << 30;

}  // namespace

Simplex::Simplex(int num_rows)
    : num_rows_(static_cast<std::size_t>(num_rows)),
      basis_(num_rows_),
      inverse_(num_rows_, Vector(num_rows_)),
      values_(num_rows_),
      duals_(num_rows_) {}

int Simplex::add(std::vector<double> column) {
  columns_.push_back(std::move(column));
  return static_cast<int>(columns_.size()) - 1;
}

bool Simplex::start(const std::vector<int>& basis) {
  for (std::size_t row = 0; row < num_rows_; ++row) {
    basis_[row] = basis[row] == kSurplus ? -1 - static_cast<int>(row) : basis[row];
  }
  if (!refactor()) return false;
  update_duals();
  return true;
}

// Gauss-Jordan with row pivoting on [basis | identity].
bool Simplex::refactor() {
  const std::size_t m = num_rows_;
  std::vector<Vector> rows(m, Vector(2 * m));
  for (std::size_t j = 0; j < m; ++j) {
    const int basic = basis_[j];
    if (basic >= 0) {
      for (std::size_t i = 0; i < m; ++i) rows[i][j] = columns_[static_cast<std::size_t>(basic)][i];
    } else {
      rows[static_cast<std::size_t>(-1 - basic)][j] = -1;
    }
    rows[j][m + j] = 1;
  }
  for (std::size_t c = 0; c < m; ++c) {
    std::size_t best = c;
    for (std::size_t i = c + 1; i < m; ++i) {
      if (std::fabs(rows[i][c]) > std::fabs(rows[best][c])) best = i;
    }
    std::swap(rows[c], rows[best]);
    const double divisor = rows[c][c];
    if (std::fabs(divisor) < kSingular) return false;
    for (double& value : rows[c]) value /= divisor;
    for (std::size_t i = 0; i < m; ++i) {
      const double factor = rows[i][c];
      if (i == c || factor == 0) continue;
      for (std::size_t j = c; j < 2 * m; ++j) rows[i][j] -= factor * rows[c][j];
    }
  }
  for (std::size_t i = 0; i < m; ++i) {
    double value = 0;
    for (std::size_t j = 0; j < m; ++j) {
      inverse_[i][j] = rows[i][m + j];
      value += inverse_[i][j];
    }
    if (value < -1e-6) return false;
    values_[i] = std::max(0.0, value);
  }
  return true;
}

// A basic column costs 1, a surplus nothing.
void Simplex::update_duals() {
  std::fill(duals_.begin(), duals_.end(), 0.0);
  for (std::size_t i = 0; i < num_rows_; ++i) {
    if (basis_[i] < 0) continue;
    for (std::size_t j = 0; j < num_rows_; ++j) duals_[j] += inverse_[i][j];
  }
}

// The variable with the largest gain a unit; kNone at the optimum.
int Simplex::entering() const {
  int best = kNone;
  double most = kTolerance;
  for (std::size_t j = 0; j < columns_.size(); ++j) {
    double gain = -1;
    for (std::size_t i = 0; i < num_rows_; ++i) gain += duals_[i] * columns_[j][i];
    if (gain > most) {
      most = gain;
      best = static_cast<int>(j);
    }
  }
  for (std::size_t i = 0; i < num_rows_; ++i) {
    if (-duals_[i] > most) {
      most = -duals_[i];
      best = -1 - static_cast<int>(i);
    }
  }
  return best;
}

int Simplex::leaving(const Vector& direction) const {
  int best = kNone;
  double least = 0;
  for (std::size_t i = 0; i < num_rows_; ++i) {
    if (direction[i] <= kTolerance) continue;
    const double ratio = values_[i] / direction[i];
    const bool tie = best != kNone && ratio < least + 1e-12 && ratio >= least - 1e-12;
    const bool better = best == kNone || ratio < least - 1e-12;
    if (better || (tie && direction[i] > direction[static_cast<std::size_t>(best)])) {
      best = static_cast<int>(i);
      least = ratio;
    }
  }
  return best;
}

void Simplex::pivot(int row, const Vector& direction, int entering) {
  const auto r = static_cast<std::size_t>(row);
  const double amount = values_[r] / direction[r];
  for (std::size_t i = 0; i < num_rows_; ++i) {
    values_[i] = std::max(0.0, values_[i] - amount * direction[i]);
  }
  values_[r] = amount;
  basis_[r] = entering;
  for (double& value : inverse_[r]) value /= direction[r];
  for (std::size_t i = 0; i < num_rows_; ++i) {
    if (i == r || direction[i] == 0) continue;
    for (std::size_t j = 0; j < num_rows_; ++j) inverse_[i][j] -= direction[i] * inverse_[r][j];
  }
}

Simplex::Step Simplex::step() {
  const int enters = entering();
  if (enters == kNone) return Step::kOptimal;
  if (++num_pivots_ > kMaxPivots) return Step::kGaveUp;
  Vector direction(num_rows_);
  for (std::size_t i = 0; i < num_rows_; ++i) {
    if (enters < 0) {
      direction[i] = -inverse_[i][static_cast<std::size_t>(-1 - enters)];
      continue;
    }
    const Vector& column = columns_[static_cast<std::size_t>(enters)];
    for (std::size_t j = 0; j < num_rows_; ++j) direction[i] += inverse_[i][j] * column[j];
  }
  const int leaves = leaving(direction);
  if (leaves == kNone) return Step::kGaveUp;
  pivot(leaves, direction, enters);
  if (num_pivots_ % kRefactorEvery == 0 && !refactor()) return Step::kGaveUp;
  update_duals();
  return Step::kMoved;
}

double Simplex::value() const {
  double sum = 0;
  for (std::size_t i = 0; i < num_rows_; ++i) {
    if (basis_[i] >= 0) sum += values_[i];
  }
  return sum;
}

double Simplex::x(int column) const {
  for (std::size_t i = 0; i < num_rows_; ++i) {
    if (basis_[i] == column) return values_[i];
  }
  return 0;
}

}  // namespace dmuon::balance
