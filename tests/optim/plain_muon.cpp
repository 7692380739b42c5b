#include "tests/optim/plain_muon.h"

#include <cmath>

namespace dmuon::optim {
namespace {

Plain product(const Plain& a, const Plain& b) {
  Plain result{a.rows, b.cols, std::vector<double>(a.rows * b.cols, 0)};
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < b.cols; ++j) {
      for (std::size_t k = 0; k < a.cols; ++k) result.at(i, j) += a.at(i, k) * b.at(k, j);
    }
  }
  return result;
}

Plain transpose(const Plain& a) {
  Plain result{a.cols, a.rows, std::vector<double>(a.values.size())};
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < a.cols; ++j) result.at(j, i) = a.at(i, j);
  }
  return result;
}

Plain newton_schulz(Plain x, const std::vector<std::array<double, 3>>& coefficients) {
  double squared = 0;
  for (const double value : x.values) squared += value * value;
  if (squared == 0) return x;
  for (double& value : x.values) value /= std::sqrt(squared);
  for (const auto& [a, b, c] : coefficients) {
    const Plain r = product(x, transpose(x));
    const Plain rx = product(r, x);
    const Plain rrx = product(r, rx);
    for (std::size_t i = 0; i < x.values.size(); ++i) {
      x.values[i] = a * x.values[i] + b * rx.values[i] + c * rrx.values[i];
    }
  }
  return x;
}

}  // namespace

Plain plain_orthogonalised(Plain* momentum, const Plain& gradient, const PlainOptions& options) {
  const double mu = options.momentum;
  Plain update = gradient;
  for (std::size_t i = 0; i < update.values.size(); ++i) {
    double& m = momentum->values[i];
    m = mu * m + (1 - mu) * gradient.values[i];
    update.values[i] = options.nesterov ? (1 - mu) * gradient.values[i] + mu * m : m;
  }
  return newton_schulz(update, options.coefficients);
}

void plain_muon_update(Plain* master, Plain* momentum, const Plain& gradient,
                       const PlainOptions& options) {
  const Plain direction = plain_orthogonalised(momentum, gradient, options);
  for (std::size_t i = 0; i < master->values.size(); ++i) {
    double& w = master->values[i];
    w = w * (1 - options.lr * options.weight_decay) - options.adjusted_lr * direction.values[i];
  }
}

}  // namespace dmuon::optim
