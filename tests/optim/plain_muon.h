#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace dmuon::optim {

/// A dense matrix of doubles, row by row.
struct Plain {
  std::size_t rows;
  std::size_t cols;
  std::vector<double> values;

  double& at(std::size_t row, std::size_t col) { return values[row * cols + col]; }
  double at(std::size_t row, std::size_t col) const { return values[row * cols + col]; }
};

struct PlainOptions {
  double lr;
  double adjusted_lr;
  double weight_decay;
  double momentum;
  bool nesterov;
  std::vector<std::array<double, 3>> coefficients;
};

/// Moves the momentum. Returns the orthogonalised direction.
Plain plain_orthogonalised(Plain* momentum, const Plain& gradient, const PlainOptions& options);

/// Muon as the paper writes it (eq. muon-update), element by element in fp64, one matrix at a time.
void plain_muon_update(Plain* master, Plain* momentum, const Plain& gradient,
                       const PlainOptions& options);

}  // namespace dmuon::optim
