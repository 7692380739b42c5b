#include "dmuon/balance/cover.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tests/balance/random.h"

namespace dmuon::balance {
namespace {

constexpr int kNumPrograms = 300;
constexpr double kTolerance = 1e-6;

using Patterns = std::vector<std::vector<double>>;

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// Weak duality needs no trust in the search: a cover and prices of one sum are both optimal.
void expect_optimal(const Cover& cover, const Patterns& patterns, std::size_t num_kinds) {
  ASSERT_EQ(cover.amounts.size(), patterns.size());
  ASSERT_EQ(cover.prices.size(), num_kinds);
  std::vector<double> covered(num_kinds, 0);
  for (std::size_t p = 0; p < patterns.size(); ++p) {
    ASSERT_GE(cover.amounts[p], -kTolerance);
    double worth = 0;
    for (std::size_t k = 0; k < num_kinds; ++k) {
      covered[k] += cover.amounts[p] * patterns[p][k];
      worth += cover.prices[k] * patterns[p][k];
    }
    ASSERT_LE(worth, 1 + kTolerance);
  }
  for (std::size_t k = 0; k < num_kinds; ++k) {
    ASSERT_GE(covered[k], 1 - kTolerance) << "kind " << k;
    ASSERT_GE(cover.prices[k], -kTolerance);
  }
  ASSERT_NEAR(sum(cover.amounts), sum(cover.prices), kTolerance);
}

// A pattern for each kind alone, so that there is a cover, and others.
Patterns draw_patterns(Random& random, std::size_t num_kinds, int num_others) {
  Patterns patterns;
  for (std::size_t k = 0; k < num_kinds; ++k) {
    patterns.emplace_back(num_kinds, 0)[k] = 0.1 * (1 + random.below(9));
  }
  for (; num_others > 0; --num_others) {
    for (double& value : patterns.emplace_back(num_kinds, 0)) {
      if (random.below(3) > 0) value = random.below(21) / 10.0;
    }
  }
  return patterns;
}

TEST(CheapestCover, IsOptimalByWeakDuality) {
  for (int seed = 0; seed < kNumPrograms; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const auto num_kinds = static_cast<std::size_t>(1 + random.below(8));
    const Patterns patterns = draw_patterns(random, num_kinds, random.below(60));
    expect_optimal(cheapest_cover(patterns), patterns, num_kinds);
  }
}

// Three sets of two elements each of three: half of each covers all.
TEST(CheapestCover, HalvesTheSidesOfATriangle) {
  const Patterns patterns = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {1, 1, 0}, {0, 1, 1}, {1, 0, 1}};
  const Cover cover = cheapest_cover(patterns);
  expect_optimal(cover, patterns, 3);
  EXPECT_NEAR(sum(cover.amounts), 1.5, kTolerance);
  for (std::size_t p = 3; p < 6; ++p) EXPECT_NEAR(cover.amounts[p], 0.5, kTolerance);
}

TEST(CheapestCover, StaysExactOverManyPivots) {
  Random random(5);
  const Patterns patterns = draw_patterns(random, 40, 400);
  expect_optimal(cheapest_cover(patterns), patterns, 40);
}

TEST(CheapestCover, OfNoPatternsOrOfAKindThatNobodyHasIsEmpty) {
  EXPECT_TRUE(cheapest_cover({}).amounts.empty());
  EXPECT_TRUE(cheapest_cover({{1, 0}, {2, 0}}).amounts.empty());
}

}  // namespace
}  // namespace dmuon::balance
