#pragma once

#include <vector>

namespace dmuon::balance {

/// The fewest patterns, in fractions, that cover every kind of work once, and what each kind is
/// worth then: min sum amounts subject to sum_p amounts[p] * patterns[p][k] >= 1 for each kind k.
/// Both have one sum.
struct Cover {
  std::vector<double> amounts;  ///< [patterns] >= 0
  std::vector<double> prices;   ///< [kinds] >= 0; no pattern is worth more than 1
};

/// A dense simplex, begun at prices of 0, for few kinds. It serves searches whose results are
/// proved otherwise, so it may stop early: a wrong digit costs quality, never truth. Only + - * /
/// are used, in a fixed order: equal steps on every machine that does not contract them.
/// @param patterns [patterns][kinds] >= 0; each kind is in some pattern.
/// @return empty if it gives up.
Cover cheapest_cover(const std::vector<std::vector<double>>& patterns);

}  // namespace dmuon::balance
