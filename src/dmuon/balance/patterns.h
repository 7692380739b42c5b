#pragma once

#include <cstdint>

#include "dmuon/balance/owner_time.h"

namespace dmuon::balance {

/// How many matrices of each shape one owner takes.
using Pattern = PerShape<int>;

/// What an owner takes for these matrices.
Nanoseconds load(const Problem& problem, const Pattern& pattern);

/// What work is worth: the prices of Certificate::Kind::kPatterns.
struct Prices {
  PerShape<std::int64_t> per_matrix;  ///< >= 0
  PerShape<std::int64_t> per_ns;      ///< >= 0
};

struct PricedPattern {
  Pattern pattern;
  std::int64_t value = 0;  ///< no pattern with a load of at most `limit` is worth more
};

/// The most valuable pattern of at most `available` matrices of each shape: a knapsack over `cells`
/// parts of `limit`. A load is rounded down to whole cells, so the pattern found may take a little
/// more than the limit, and its value bounds that of all that do not.
/// @param limit > 0. @param cells in [1, limit].
PricedPattern most_valuable(const Problem& problem, const Prices& prices, Nanoseconds limit,
                            int cells, const PerShape<int>& available);

}  // namespace dmuon::balance
