#include "dmuon/balance/owner_time.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "dmuon/core/error.h"
#include "tests/balance/brute_force.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

constexpr int kNumShapes = 300;
constexpr int kNumMatrices = 14;

Nanoseconds cost(const CostedShape& shape, const std::vector<int>& sizes) {
  Nanoseconds sum = 0;
  for (const int size : sizes) {
    const auto batch = std::find_if(shape.batches.begin(), shape.batches.end(),
                                    [&](const BatchTime& one) { return one.size == size; });
    if (batch == shape.batches.end()) return -1;
    sum += batch->ns;
  }
  return sum;
}

TEST(OwnerTime, KnowsTheCheapestBatches) {
  // Five: 4 + 1 takes 9, 2 + 2 + 1 takes 11, and five alone 15.
  const OwnerTime time({.num_matrices = 5, .batches = {{1, 3}, {2, 4}, {4, 6}}});
  EXPECT_EQ(time.num_matrices(), 5);
  EXPECT_EQ(time(0), 0);
  EXPECT_EQ(time(1), 3);
  EXPECT_EQ(time(3), 7);
  EXPECT_EQ(time(5), 9);
  EXPECT_EQ(time.batches(5), (std::vector<int>{4, 1}));
  EXPECT_TRUE(time.batches(0).empty());
}

TEST(OwnerTime, MayFallWithMoreMatrices) {
  const OwnerTime time({.num_matrices = 4, .batches = {{1, 10}, {2, 3}, {3, 50}}});
  EXPECT_EQ(time(1), 10);
  EXPECT_EQ(time(2), 3);
  EXPECT_EQ(time(3), 13);
  EXPECT_EQ(time(4), 6);
  EXPECT_EQ(time.at_least(1), 3);
  EXPECT_EQ(time.at_least(3), 6);
  EXPECT_EQ(time.at_least(4), 6);
}

TEST(OwnerTime, OfEqualWaysTakesTheSmallestBatches) {
  const OwnerTime time({.num_matrices = 4, .batches = {{1, 5}, {2, 10}, {4, 20}}});
  EXPECT_EQ(time.batches(4), (std::vector<int>{1, 1, 1, 1}));
}

TEST(OwnerTime, EqualsTheEnumerationOfAllSplits) {
  for (int seed = 0; seed < kNumShapes; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const CostedShape shape = draw_shape(random, kNumMatrices);
    const OwnerTime time(shape);
    for (int k = 0; k <= kNumMatrices; ++k) {
      ASSERT_EQ(time(k), cheapest_split(shape, k)) << "seed " << seed << ", k " << k;
    }
  }
}

TEST(OwnerTime, BatchesAddUpToTheMatricesAndTheTime) {
  for (int seed = 0; seed < kNumShapes; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const CostedShape shape = draw_shape(random, kNumMatrices);
    const OwnerTime time(shape);
    for (int k = 0; k <= kNumMatrices; ++k) {
      const std::vector<int> sizes = time.batches(k);
      ASSERT_EQ(std::accumulate(sizes.begin(), sizes.end(), 0), k) << "seed " << seed;
      ASSERT_EQ(cost(shape, sizes), time(k)) << "seed " << seed << ", k " << k;
      ASSERT_TRUE(std::is_sorted(sizes.rbegin(), sizes.rend())) << "seed " << seed;
    }
  }
}

TEST(OwnerTime, AtLeastIsTheLeastOfThatManyOrMore) {
  for (int seed = 0; seed < kNumShapes; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const OwnerTime time(draw_shape(random, kNumMatrices));
    for (int k = 0; k <= kNumMatrices; ++k) {
      Nanoseconds least = time(k);
      for (int more = k; more <= kNumMatrices; ++more) least = std::min(least, time(more));
      ASSERT_EQ(time.at_least(k), least) << "seed " << seed << ", k " << k;
    }
  }
}

TEST(Problem, ValidatesItsInstance) {
  EXPECT_THROW(Problem({.shapes = {{1, {}}}}), core::InvalidArgument);
  EXPECT_THROW(Problem({.shapes = {}, .num_owners = 0}), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::balance
