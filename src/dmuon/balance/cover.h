#pragma once

#include <vector>

namespace dmuon::balance {

/// The fewest patterns, in fractions, that cover every kind of work once, and the price of each
/// kind: min sum amounts subject to sum_p amounts[p] * patterns[p][k] >= 1 for each kind k. Amounts
/// and prices have the same sum.
struct Cover {
  std::vector<double> amounts;  ///< [patterns] >= 0
  std::vector<double> prices;   ///< [kinds] >= 0; no pattern is worth more than 1
};

/// Solves the program by a dense simplex that starts at prices of 0; for few kinds. Searches use
/// the result and other code proves it. So the simplex may stop early: a wrong digit costs quality,
/// never truth. It uses only + - * /, in a fixed order, so its steps are equal on every machine
/// that does not contract them. Pure function.
/// @param patterns [patterns][kinds] >= 0; each kind is in some pattern.
/// @return empty if it gives up.
Cover cheapest_cover(const std::vector<std::vector<double>>& patterns);

}  // namespace dmuon::balance
