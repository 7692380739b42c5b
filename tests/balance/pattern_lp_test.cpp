#include "dmuon/balance/pattern_lp.h"

#include <gtest/gtest.h>

#include "dmuon/balance/verify.h"
#include "tests/balance/brute_force.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

constexpr int kNumPatternLpInstances = 300;

PatternLp::Question question(const Problem& problem, Nanoseconds limit) {
  return {.limit = limit,
          .num_matrices = problem.num_matrices(),
          .num_owners = static_cast<double>(problem.num_owners())};
}

TEST(PatternLp, ProvesThatTwentyFiveIsImpossible) {
  const Problem problem({.shapes = {{3, {{1, 10}}}, {3, {{1, 6}}}}, .num_owners = 2});
  PatternLp lp(problem);
  const PatternLp::Answer answer = lp.solve(question(problem, 25));
  EXPECT_TRUE(answer.impossible);
  ASSERT_TRUE(answer.proof.has_value());
  EXPECT_EQ(answer.proof->bound, 26);
  EXPECT_EQ(verify(problem.instance(), *answer.proof), "");
  EXPECT_FALSE(lp.solve(question(problem, 26)).impossible);
}

TEST(PatternLp, FindsMatricesLongerThanTheLimit) {
  const Problem problem({.shapes = {{1, {{1, 10}}}}, .num_owners = 2});
  PatternLp lp(problem);
  EXPECT_TRUE(lp.solve(question(problem, 9)).impossible);
  EXPECT_FALSE(lp.solve(question(problem, 10)).impossible);
}

TEST(PatternLp, ProvesNothingAboutAPartOfTheWork) {
  const Problem problem({.shapes = {{3, {{1, 10}}}, {3, {{1, 6}}}}, .num_owners = 2});
  PatternLp lp(problem);
  // Three owners or more have a ten each.
  PatternLp::Question part = question(problem, 15);
  part.num_matrices = {3, 2};
  part.num_owners = 0;
  EXPECT_FALSE(lp.solve(part).proof.has_value());
  EXPECT_TRUE(lp.solve(question(problem, 15)).proof.has_value());
}

TEST(PatternLp, UsesPatternsThatDoAllWorkWithinTheLimit) {
  for (int seed = 0; seed < kNumPatternLpInstances; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const Problem problem(draw_small(random, 20, 4));
    Nanoseconds limit = 1;
    for (const ShapeIndex s : problem.shapes()) {
      limit += problem.time(s)(problem.num_matrices(s)) / problem.num_owners();
    }
    PatternLp lp(problem);
    const PatternLp::Answer answer = lp.solve(question(problem, limit));
    if (answer.impossible) continue;
    PerShape<double> done(problem.num_matrices().size());
    for (const PatternLp::Use& use : answer.uses) {
      EXPECT_GT(use.amount, 0);
      // In 4096 cells, rounded down, a pattern may take a little more.
      EXPECT_LE(load(problem, use.pattern), limit + limit / 4096 * done.size());
      for (const ShapeIndex s : problem.shapes()) done[s] += use.amount * use.pattern[s];
    }
    for (const ShapeIndex s : problem.shapes()) {
      EXPECT_GE(done[s], problem.num_matrices(s) - 1e-6);
    }
  }
}

TEST(PatternLp, ProvesOnlyWhatIsTrue) {
  int num_tight = 0;
  for (int seed = 0; seed < kNumPatternLpInstances; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const Instance instance = draw_small(random, 7, 3);
    const Problem problem(instance);
    const Nanoseconds least = optimum(instance);
    PatternLp lp(problem);
    for (const Nanoseconds limit : {least - 1, least, least + least / 10}) {
      if (limit <= 0) continue;
      const PatternLp::Answer answer = lp.solve(question(problem, limit));
      if (!answer.proof) continue;
      EXPECT_LT(limit, least);
      EXPECT_EQ(answer.proof->bound, limit + 1);
      EXPECT_EQ(verify(instance, *answer.proof), "");
      ++num_tight;
    }
  }
  EXPECT_GT(num_tight, kNumPatternLpInstances / 6);
}

}  // namespace
}  // namespace dmuon::balance
