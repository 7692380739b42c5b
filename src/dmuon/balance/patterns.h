#pragma once

#include <cstdint>

#include "dmuon/balance/owner_time.h"

namespace dmuon::balance {

/// The number of matrices of each shape that one owner gets.
using Pattern = PerShape<int>;

/// Returns an owner's time for these matrices. Pure function.
Nanoseconds load(const Problem& problem, const Pattern& pattern);

/// Prices of work, as in Certificate::Kind::kPatterns.
struct Prices {
  PerShape<std::int64_t> per_matrix;  ///< >= 0
  PerShape<std::int64_t> per_ns;      ///< >= 0
};

struct PricedPattern {
  Pattern pattern;
  std::int64_t value = 0;  ///< no pattern with a load of at most `limit` is worth more
};

/// Returns the most valuable pattern of at most `available` matrices of each shape: a knapsack over
/// `cells` parts of `limit`. Loads are rounded down to whole cells. So the pattern may exceed the
/// limit a little, and no pattern within the limit is worth more. Pure function.
/// @param limit > 0. @param cells in [1, limit].
PricedPattern most_valuable(const Problem& problem, const Prices& prices, Nanoseconds limit,
                            int cells, const PerShape<int>& available);

}  // namespace dmuon::balance
