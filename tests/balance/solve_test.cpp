#include "dmuon/balance/solve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "dmuon/balance/construct.h"
#include "dmuon/balance/verify.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

constexpr int kNumSmall = 150;
constexpr int kNumModels = 6;

// Each matrix has one owner, and loads and bytes are those of the counts.
void expect_consistent(const Assignment& assignment) {
  const Problem& problem = assignment.problem();
  for (const ShapeIndex s : problem.shapes()) {
    int placed = 0;
    for (const Owner owner : problem.owners()) {
      ASSERT_GE(assignment.count(owner, s), 0);
      placed += assignment.count(owner, s);
    }
    ASSERT_EQ(placed, problem.num_matrices(s));
  }
  Nanoseconds slowest = 0;
  for (const Owner owner : problem.owners()) {
    Nanoseconds load = 0;
    std::int64_t bytes = 0;
    for (const ShapeIndex s : problem.shapes()) {
      load += problem.time(s)(assignment.count(owner, s));
      bytes += assignment.count(owner, s) * problem.bytes(s);
    }
    ASSERT_EQ(assignment.load(owner), load);
    ASSERT_EQ(assignment.bytes(owner), bytes);
    slowest = std::max(slowest, load);
  }
  ASSERT_EQ(assignment.makespan(), slowest);
}

void check(const Instance& instance) {
  const Problem problem(instance);
  const Solution solution = solve(problem);
  expect_consistent(solution.assignment);
  EXPECT_EQ(verify(instance, solution.certificate), "");
  EXPECT_LE(solution.certificate.bound, solution.assignment.makespan());
  EXPECT_LE(solution.assignment.makespan(), longest_first(problem, 1)->makespan());
  EXPECT_LE(solution.assignment.makespan(), least_loaded(problem)->makespan());
}

Nanoseconds makespan(const Instance& instance) {
  return solve(Problem(instance)).assignment.makespan();
}

TEST(Solve, PlacesEachMatrixOnceAndBeatsTheSimpleRules) {
  for (int seed = 0; seed < kNumSmall; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    check(draw_small(random, 14, 6));
  }
  for (int seed = 0; seed < kNumModels; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    check(draw_model(random, 80, 24));
  }
}

// Nearly qwen2.5-7b and llama-3-70b, where the bound can be reached: searches must go on until 0.2
// %.
TEST(Solve, ComesWithinItsToleranceOfTheBoundsOfModels) {
  const std::vector<std::vector<std::pair<int, Nanoseconds>>> models = {
      {{84, 4'570'207}, {56, 2'005'189}, {56, 167'102}},
      {{240, 78'765'432}, {160, 21'987'654}, {160, 1'012'345}}};
  for (const auto& model : models) {
    for (const int num_owners : {4, 8, 16, 32}) {
      Instance instance{.shapes = {}, .num_owners = num_owners};
      for (const auto& [num_matrices, each] : model) {
        CostedShape& shape = instance.shapes.emplace_back();
        shape.num_matrices = num_matrices;
        for (int size = 1, percent = 100; size <= 16; size *= 2, percent -= 8) {
          shape.batches.push_back({size, 150'000 + size * each / 100 * percent});
        }
      }
      const Problem problem(instance);
      const Solution solution = solve(problem);
      const Nanoseconds slowest = solution.assignment.makespan();
      const Nanoseconds bound = solution.certificate.bound;
      EXPECT_LE(slowest, bound + bound / 500)
          << model.front().first << " of the first shape, " << num_owners << " owners";
    }
  }
}

// Half of the first assignments are 9 % or more above the bound, and 5 of the 60 within the
// tolerance. The search brings 45 within it. With random escapes and new divisions of two owners'
// work it would be 48; over the instances of bench/plan_stress those are worth 0.7 % at most.
TEST(Solve, SearchesOnUntilItsTolerance) {
  int num_within = 0;
  for (int seed = 0; seed < 60; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const Problem problem(draw_model(random, 80, 24));
    const Solution solution = solve(problem);
    const Nanoseconds bound = solution.certificate.bound;
    const Nanoseconds makespan = solution.assignment.makespan();
    num_within += makespan <= bound + bound / 500 ? 1 : 0;
    EXPECT_LE(makespan, bound + bound / 40) << "seed " << seed;
  }
  EXPECT_GE(num_within, 44);
}

TEST(Solve, GivesOneOwnerAll) {
  Random random(1);
  Instance instance = draw_model(random, 80, 24);
  instance.num_owners = 1;
  const Problem problem(instance);
  Nanoseconds all = 0;
  for (const ShapeIndex s : problem.shapes()) all += problem.time(s)(problem.num_matrices(s));
  const Solution solution = solve(problem);
  EXPECT_EQ(solution.assignment.makespan(), all);
  EXPECT_EQ(solution.certificate.bound, all);
}

TEST(Solve, LeavesOwnersWithoutMatrices) {
  const Problem problem({.shapes = {{2, {{1, 9}}}, {1, {{1, 20}}}}, .num_owners = 50});
  const Solution solution = solve(problem);
  expect_consistent(solution.assignment);
  EXPECT_EQ(solution.assignment.makespan(), 20);
  EXPECT_EQ(solution.certificate.bound, 20);
}

// Nobody who has one matrix is as fast as somebody who has two.
TEST(Solve, UsesFallingTimes) {
  const Problem problem({.shapes = {{4, {{1, 10}, {2, 3}}}}, .num_owners = 4});
  const Solution solution = solve(problem);
  EXPECT_EQ(solution.assignment.makespan(), 3);
  EXPECT_EQ(solution.certificate.bound, 3);
}

TEST(Solve, AcceptsNothingToDo) {
  const std::vector<Instance> idle = {
      {},
      {.shapes = {}, .num_owners = 7},
      {.shapes = {{0, {{1, 5}}}}, .num_owners = 3},
      {.shapes = {{9, {{1, 0}, {4, 0}}}, {1, {{1, 0}}}}, .num_owners = 3},
      {.shapes = {{9, {{1, 0}, {4, 8}}}}, .num_owners = 3}};
  for (const Instance& instance : idle) {
    const Problem problem(instance);
    const Solution solution = solve(problem);
    expect_consistent(solution.assignment);
    EXPECT_EQ(solution.assignment.makespan(), 0);
    EXPECT_EQ(solution.certificate.bound, 0);
    EXPECT_EQ(verify(instance, solution.certificate), "");
  }
}

TEST(Solve, DividesEqualMatricesEvenly) {
  const Problem problem({.shapes = {{6, {{1, 5}}}, {6, {{1, 5}}}}, .num_owners = 4});
  const Solution solution = solve(problem);
  EXPECT_EQ(solution.assignment.loads(), PerOwner<Nanoseconds>(4, 15));
  EXPECT_EQ(solution.certificate.bound, 15);
}

// Ties break otherwise, and searches end within 0.2 % of the bound.
TEST(Solve, CaresLittleForTheOrderOfShapes) {
  for (int seed = 0; seed < kNumSmall; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    Instance instance = draw_small(random, 8, 4);
    const Nanoseconds before = makespan(instance);
    std::reverse(instance.shapes.begin(), instance.shapes.end());
    const Nanoseconds after = makespan(instance);
    EXPECT_LE(std::max(before, after), std::min(before, after) * 1002 / 1000 + 1)
        << "seed " << seed;
  }
}

TEST(Solve, RepeatsItself) {
  Random random(3);
  const Problem problem(draw_model(random, 80, 24));
  const Solution one = solve(problem);
  const Solution two = solve(problem);
  EXPECT_EQ(one.assignment.loads(), two.assignment.loads());
  EXPECT_EQ(one.certificate, two.certificate);
}

// Sums and prices stay within 64 bits; the sanitizer would object.
TEST(Solve, ComputesAtTheLimitOfTimes) {
  constexpr Nanoseconds kEighth = kMaxTotalNs / 8;
  check({.shapes = {{4, {{1, kEighth}, {2, kEighth}, {4, kMaxTotalNs}}}, {4, {{1, kEighth}}}},
         .num_owners = 3});
  check({.shapes = {{2, {{1, kMaxTotalNs / 2}}}}, .num_owners = 1});
  check({.shapes = {{5, {{1, kEighth}, {3, kEighth * 2 - 1}}}, {3, {{1, kEighth - 7}, {2, 1}}}},
         .num_owners = 2});
}

TEST(LowerBound, IsAtMostTheMakespanGiven) {
  for (int seed = 0; seed < kNumModels; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const Instance instance = draw_model(random, 80, 24);
    const Problem problem(instance);
    const Nanoseconds upper = least_loaded(problem)->makespan();
    const Certificate certificate = lower_bound(problem, upper);
    EXPECT_LE(certificate.bound, upper);
    EXPECT_EQ(verify(instance, certificate), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace dmuon::balance
