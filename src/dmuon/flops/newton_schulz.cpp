#include "dmuon/flops/newton_schulz.h"

#include <algorithm>

namespace dmuon::flops {

Products products(int steps, Form form) {
  if (steps <= 0) return {};
  if (form == Form::kDirect) return {steps, steps, steps};
  const int segments = steps > kRestartStep ? 2 : 1;
  return {segments, 4 * steps - 3 * segments, segments};
}

double orthogonalisation(std::int64_t m, std::int64_t n, int steps, Form form,
                         const SymmetricCost& symmetric) {
  const auto rows = static_cast<double>(std::min(m, n));
  const auto cols = static_cast<double>(std::max(m, n));
  const Products count = products(steps, form);
  const double to_square = symmetric.share * product(rows, rows, cols);
  const double square = symmetric.share * product(rows, rows, rows);
  const double to_wide = product(rows, cols, rows);
  if (form == Form::kDirect) return count.square * (to_square + square + to_wide);
  return count.to_wide * to_wide +
         symmetric.gram_dtype * (count.to_square * to_square + count.square * square);
}

Form cheaper_form(std::int64_t m, std::int64_t n, int steps, const SymmetricCost& symmetric) {
  return orthogonalisation(m, n, steps, Form::kGram, symmetric) <
                 orthogonalisation(m, n, steps, Form::kDirect, symmetric)
             ? Form::kGram
             : Form::kDirect;
}

}  // namespace dmuon::flops
