// Against brute force: what solve() finds is the optimum, or within its tolerance of it.

#include <gtest/gtest.h>

#include "dmuon/balance/solve.h"
#include "tests/balance/brute_force.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

constexpr int kNumSolveOptimumInstances = 600;

void check(const Instance& instance, int seed, int* num_optimal) {
  const Problem problem(instance);
  const Solution solution = solve(problem);
  const Nanoseconds least = optimum(instance);
  const Nanoseconds makespan = solution.assignment.makespan();
  ASSERT_LE(solution.certificate.bound, least) << "seed " << seed;
  ASSERT_LE(least, makespan) << "seed " << seed;
  // Searches end within 0.2 % of the bound (good_enough in solve.cpp).
  ASSERT_LE(makespan, least + least / 500 + 1) << "seed " << seed;
  *num_optimal += makespan == least ? 1 : 0;
}

TEST(Solve, FindsTheOptimumOfSmallInstances) {
  int num_optimal = 0;
  for (int seed = 0; seed < kNumSolveOptimumInstances; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    check(draw_small(random, 6, 3), seed, &num_optimal);
  }
  // Of 20,000 seeds 87 stop short of it, by less than 0.09 %.
  EXPECT_GE(num_optimal, kNumSolveOptimumInstances * 99 / 100);
}

TEST(Solve, FindsTheOptimumOfLessSmallInstances) {
  int num_optimal = 0;
  for (int seed = 0; seed < kNumSolveOptimumInstances / 4; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    check(draw_small(random, 14, 4), seed, &num_optimal);
  }
  EXPECT_GE(num_optimal, kNumSolveOptimumInstances / 4 * 97 / 100);
}

// Two owners, 3 matrices of 10 ns and 3 of 6: half of it all is 24, but no sum of both lies between
// 22 and 26.
TEST(Solve, ProvesWhatDoesNotDivide) {
  const Problem problem({.shapes = {{3, {{1, 10}}}, {3, {{1, 6}}}}, .num_owners = 2});
  const Solution solution = solve(problem);
  EXPECT_EQ(solution.assignment.makespan(), 26);
  EXPECT_EQ(solution.certificate.bound, 26);
  EXPECT_EQ(solution.certificate.kind, Certificate::Kind::kPatterns);
}

}  // namespace
}  // namespace dmuon::balance
