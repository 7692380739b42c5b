#include "dmuon/flops/newton_schulz.h"

#include <algorithm>
#include <cstddef>

namespace dmuon::flops {

Segments segments(int steps, Form form) {
  Segments lengths;
  for (int done = 0; done < steps; done += lengths.back()) {
    const int rest = steps - done;
    // The position of the Gram form's restart: worst condition number of Q for Polar Express's rows
    // by step: 1: 456, 2: 85, 3: 1e5.
    const bool whole = form == Form::kGram && done > 0;
    lengths.push_back(form == Form::kDirect ? 1 : whole ? rest : std::min(rest, 2));
  }
  return lengths;
}

bool leads(const Segments& segments) { return segments.size() > 1 && segments.front() == 3; }

Products products(const Segments& segments) {
  Products sum;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const bool apart = i == 0 && leads(segments);
    ++sum.to_square;
    sum.square += 2 * segments[i] - 1;
    (apart ? sum.square : sum.mixed) += 2 * segments[i] - 2;
    ++sum.to_wide;
  }
  return sum;
}

double orthogonalisation(std::int64_t m, std::int64_t n, int steps, Form form,
                         const SymmetricCost& symmetric) {
  return orthogonalisation(m, n, segments(steps, form), form, symmetric);
}

double orthogonalisation(std::int64_t m, std::int64_t n, const Segments& segments, Form form,
                         const SymmetricCost& symmetric) {
  const auto rows = static_cast<double>(std::min(m, n));
  const auto cols = static_cast<double>(std::max(m, n));
  const Products count = products(segments);
  const double to_square = symmetric.share * product(rows, rows, cols);
  const double full_square = product(rows, rows, rows);
  const double square = symmetric.share * full_square;
  const double mixed = form == Form::kSegmented ? full_square : square;
  const double to_wide = product(rows, cols, rows);
  const double weight = form == Form::kGram ? symmetric.gram_dtype : 1;
  return count.to_wide * to_wide +
         weight * (count.to_square * to_square + count.square * square + count.mixed * mixed);
}

}  // namespace dmuon::flops
