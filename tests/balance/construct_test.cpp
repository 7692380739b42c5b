#include "dmuon/balance/construct.h"

#include <gtest/gtest.h>

#include <numeric>

#include "dmuon/balance/pattern_lp.h"
#include "dmuon/balance/solve.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

constexpr int kNumConstructInstances = 300;

std::vector<int> counts(const Assignment& assignment, ShapeIndex shape) {
  std::vector<int> all;
  for (const Owner owner : assignment.problem().owners()) {
    all.push_back(assignment.count(owner, shape));
  }
  return all;
}

std::vector<std::optional<Assignment>> constructed(const Problem& problem) {
  std::vector<std::optional<Assignment>> all = {longest_first(problem, 1),
                                                longest_first(problem, 3), least_loaded(problem),
                                                even(problem), fewest_bytes(problem)};
  const Nanoseconds limit =
      lower_bound(problem, least_loaded(Problem(problem)).value_or(Assignment(problem)).makespan())
          .bound;
  for (const bool work_rows : {true, false}) {
    PatternLp lp(problem);
    if (limit > 0) all.push_back(lp.dive(limit + limit / 10, work_rows));
  }
  return all;
}

void expect_complete(const Assignment& assignment) {
  EXPECT_LE(assignment.most_bytes(), assignment.problem().instance().max_bytes);
  for (const ShapeIndex s : assignment.problem().shapes()) {
    const std::vector<int> all = counts(assignment, s);
    EXPECT_EQ(std::accumulate(all.begin(), all.end(), 0), assignment.problem().num_matrices(s));
  }
}

TEST(Construct, PlacesAllMatricesWithinMaxBytesOrGivesUp) {
  int num_given_up = 0;
  int num_placed = 0;
  for (int seed = 0; seed < kNumConstructInstances; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Instance instance = draw_small(random, 20, 5);
    const bool limited = seed % 2 == 1;
    if (limited) instance.max_bytes = sufficient_bytes(Problem(instance)) - draw(random, 0, 1);
    if (instance.max_bytes < 0) continue;
    for (const std::optional<Assignment>& assignment : constructed(Problem(instance))) {
      (assignment ? num_placed : num_given_up) += 1;
      EXPECT_TRUE(assignment || limited);
    }
  }
  EXPECT_GT(num_given_up, kNumConstructInstances / 10);
  EXPECT_GT(num_placed, kNumConstructInstances);
}

TEST(Construct, PlacesEachMatrixOnceAndFits) {
  for (int seed = 0; seed < kNumConstructInstances; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Instance instance = draw_small(random, 20, 5);
    if (seed % 2 == 1) instance.max_bytes = sufficient_bytes(Problem(instance));
    const Problem problem(instance);
    for (const std::optional<Assignment>& assignment : constructed(problem)) {
      if (assignment) expect_complete(*assignment);
    }
  }
}

// Graham 1969: on three machines 5 5 4 4 3 3 3 ends at 11, where 9 is possible.
TEST(LongestFirst, MeetsGrahamsBoundOnHisWorstCase) {
  const Problem problem({.shapes = {{3, {{1, 3}}}, {2, {{1, 5}}}, {2, {{1, 4}}}}, .num_owners = 3});
  EXPECT_EQ(longest_first(problem, 1)->makespan(), 11);
  EXPECT_EQ(solve(problem).assignment.makespan(), 9);
}

TEST(LongestFirst, GivesLotsWhole) {
  const Problem problem({.shapes = {{7, {{1, 10}, {4, 16}}}}, .num_owners = 3});
  EXPECT_EQ(counts(*longest_first(problem, 4), ShapeIndex(0)), (std::vector<int>{3, 4, 0}));
}

TEST(LeastLoaded, CountsTheBatchesThatAMatrixCompletes) {
  // The fourth adds 1 ns where the third is, though that owner has the larger load.
  const Problem problem({.shapes = {{4, {{1, 10}, {2, 11}}}, {1, {{1, 15}}}}, .num_owners = 2});
  const Assignment assignment = *least_loaded(problem);
  EXPECT_EQ(counts(assignment, ShapeIndex(1)), (std::vector<int>{1, 0}));
  EXPECT_EQ(counts(assignment, ShapeIndex(0)), (std::vector<int>{0, 4}));
}

TEST(Even, GivesEverybodyAsManyAndTheRestToTheFastest) {
  const Problem problem({.shapes = {{5, {{1, 10}}}, {7, {{1, 4}}}}, .num_owners = 2});
  const Assignment assignment = *even(problem);
  EXPECT_EQ(counts(assignment, ShapeIndex(0)), (std::vector<int>{3, 2}));
  EXPECT_EQ(counts(assignment, ShapeIndex(1)), (std::vector<int>{3, 4}));
}

TEST(FewestBytes, FitsWhereTimeDoesNot) {
  // By time the two heavy ones would go together.
  Instance instance{.shapes = {{1, {{1, 100}}, 1}, {2, {{1, 1}}, 50}}, .num_owners = 2};
  const Problem problem(instance);
  EXPECT_EQ(counts(*fewest_bytes(problem), ShapeIndex(1)), (std::vector<int>{1, 1}));
  EXPECT_EQ(sufficient_bytes(problem), 51);
  EXPECT_EQ(longest_first(problem, 1)->makespan(), 100);
}

}  // namespace
}  // namespace dmuon::balance
