#include "dmuon/flops/newton_schulz.h"

#include <algorithm>
#include <cstddef>

#include "dmuon/core/error.h"

namespace dmuon::flops {

Segments segments(int steps, Form form) {
  core::invariant(form != Form::kSegmented, "segments: kSegmented goes by what was measured");
  if (form == Form::kDirect) return Segments(static_cast<std::size_t>(steps), 1);
  // The Gram form restarts after this step, where Q is conditioned best. The worst condition
  // numbers with Polar Express's rows are 456 after step 1, 85 after 2 and 1e5 after 3.
  constexpr int kRestart = 2;
  // Rounding errors of later segments grow with each step. With fp16 products, matrices of a few
  // large singular values had errors of 6 after five such steps, and overflowed after six.
  constexpr int kMostSteps = 3;
  Segments all;
  for (int left = steps; left > 0; left -= all.back())
    all.push_back(std::min(left, all.empty() ? kRestart : kMostSteps));
  return all;
}

Products products(const Segments& segments, int num_cubic) {
  Products sum;
  for (const int length : segments) {
    ++sum.to_square;
    sum.square += 4 * length - 3;
    ++sum.to_wide;
  }
  sum.square -= num_cubic;
  return sum;
}

int squares(const Segments& segments) {
  return std::ranges::any_of(segments, [](int length) { return length > 1; }) ? 4 : 2;
}

double orthogonalisation(std::int64_t m, std::int64_t n, int steps, Form form,
                         const SymmetricCost& symmetric) {
  return orthogonalisation(m, n, segments(steps, form), form, symmetric);
}

double orthogonalisation(std::int64_t m, std::int64_t n, const Segments& segments, Form form,
                         const SymmetricCost& symmetric, int num_cubic) {
  const auto rows = static_cast<double>(std::min(m, n));
  const auto cols = static_cast<double>(std::max(m, n));
  const Products count = products(segments, num_cubic);
  const double to_square = symmetric.share * product(rows, rows, cols);
  const double square = symmetric.share * product(rows, rows, rows);
  const double to_wide = product(rows, cols, rows);
  const double weight = form == Form::kGram ? symmetric.gram_dtype : 1;
  return count.to_wide * to_wide + weight * (count.to_square * to_square + count.square * square);
}

}  // namespace dmuon::flops
