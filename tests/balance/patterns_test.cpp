#include "dmuon/balance/patterns.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

constexpr int kNumPatternsInstances = 400;

std::int64_t value(const Problem& problem, const Prices& prices, const Pattern& pattern) {
  std::int64_t sum = 0;
  for (const ShapeIndex s : pattern.indices()) {
    const Nanoseconds ns = problem.time(s)(pattern[s]);
    sum += prices.per_matrix[s] * pattern[s] + prices.per_ns[s] * ns;
  }
  return sum;
}

// The most that a pattern within the limit is worth, by looking at all of them.
std::int64_t most_by_enumeration(const Problem& problem, const Prices& prices, Nanoseconds limit,
                                 const PerShape<int>& available, Pattern* pattern) {
  const ShapeIndex next(pattern->size());
  if (!available.contains(next)) {
    return load(problem, *pattern) <= limit ? value(problem, prices, *pattern) : 0;
  }
  std::int64_t most = 0;
  for (int k = 0; k <= available[next]; ++k) {
    pattern->push_back(k);
    most = std::max(most, most_by_enumeration(problem, prices, limit, available, pattern));
    pattern->pop_back();
  }
  return most;
}

struct Question {
  Problem problem;
  Prices prices;
  Nanoseconds limit;
  PerShape<int> available;
};

Question draw_question(int seed) {
  Random random(static_cast<std::uint64_t>(seed));
  Question question{Problem(draw_small(random, 12, 3)), {}, 0, {}};
  Nanoseconds all = 0;
  for (const ShapeIndex s : question.problem.shapes()) {
    const int n = question.problem.num_matrices(s);
    all += question.problem.time(s)(n);
    question.available.push_back(draw(random, 0, n));
    question.prices.per_matrix.push_back(draw(random, 0, 3) * draw(random, 0, 50));
    question.prices.per_ns.push_back(draw(random, 0, 3) == 0 ? draw(random, 0, 5) : 0);
  }
  question.limit = 1 + all * draw(random, 0, 100) / 100;
  return question;
}

TEST(MostValuable, IsExactInCellsOfOneNanosecond) {
  int num_asked = 0;
  for (int seed = 0; seed < kNumPatternsInstances; ++seed) {
    const Question asked = draw_question(seed);
    if (asked.limit > 10'000) continue;
    ++num_asked;
    const PricedPattern found = most_valuable(asked.problem, asked.prices, asked.limit,
                                              static_cast<int>(asked.limit), asked.available);
    Pattern pattern;
    EXPECT_EQ(found.value, most_by_enumeration(asked.problem, asked.prices, asked.limit,
                                               asked.available, &pattern))
        << "seed " << seed;
    EXPECT_EQ(found.value, value(asked.problem, asked.prices, found.pattern)) << "seed " << seed;
    EXPECT_LE(load(asked.problem, found.pattern), asked.limit) << "seed " << seed;
  }
  EXPECT_GT(num_asked, kNumPatternsInstances / 2);
}

TEST(MostValuable, BoundsAllPatternsInAnyCells) {
  for (int seed = 0; seed < kNumPatternsInstances; ++seed) {
    const Question asked = draw_question(seed);
    Pattern pattern;
    const std::int64_t most =
        most_by_enumeration(asked.problem, asked.prices, asked.limit, asked.available, &pattern);
    for (const int cells : {1, 2, 7, 64, 4096}) {
      if (cells > asked.limit) break;
      const PricedPattern found =
          most_valuable(asked.problem, asked.prices, asked.limit, cells, asked.available);
      EXPECT_GE(found.value, most) << "seed " << seed << ", " << cells << " cells";
      for (const ShapeIndex s : found.pattern.indices()) {
        EXPECT_LE(found.pattern[s], asked.available[s]) << "seed " << seed;
      }
    }
  }
}

// So many ways to fill an owner are put together, at prices that must not fall short.
TEST(MostValuable, BoundsShapesOfManyMatrices) {
  constexpr int kMany = 3000;
  Instance instance{.shapes = {{kMany, {{1, 7}, {4, 25}}}, {2, {{1, 1000}}}}};
  const Problem problem(instance);
  const Prices prices{{70, 10'500}, {0, 0}};
  const Nanoseconds limit = 10'000;
  std::int64_t most = 0;
  for (int k = 0; k <= kMany; ++k) {
    for (int heavy = 0; heavy <= 2; ++heavy) {
      if (problem.time(ShapeIndex(0))(k) + heavy * 1000 > limit) continue;
      most = std::max<std::int64_t>(most, 70 * k + 10'500 * heavy);
    }
  }
  const PricedPattern found = most_valuable(problem, prices, limit, 4096, {kMany, 2});
  EXPECT_GE(found.value, most);
  EXPECT_LE(found.value, most + most / 50);
}

TEST(Load, AddsTheTimesOfAllShapes) {
  const Problem problem({.shapes = {{4, {{1, 5}, {2, 7}}}, {2, {{1, 100}}}}});
  EXPECT_EQ(load(problem, {3, 1}), 112);
  EXPECT_EQ(load(problem, {0, 0}), 0);
}

}  // namespace
}  // namespace dmuon::balance
