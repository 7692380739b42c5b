#include <gtest/gtest.h>

#include "dmuon/balance/solve.h"
#include "dmuon/balance/verify.h"
#include "tests/balance/brute_force.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

using Kind = Certificate::Kind;

Certificate bound_of(const Instance& instance) { return simple_bound(Problem(instance)); }

TEST(SimpleBound, SomebodyHasTheRoundedShareOrMore) {
  // Three owners, seven matrices: somebody has three.
  const Certificate certificate = bound_of({.shapes = {{7, {{1, 10}}}}, .num_owners = 3});
  EXPECT_EQ(certificate.kind, Kind::kOneOwner);
  EXPECT_EQ(certificate.shape.value(), 0);
  EXPECT_EQ(certificate.bound, 30);
}

TEST(SimpleBound, SomebodyMayHaveMoreInLessTime) {
  const Certificate certificate =
      bound_of({.shapes = {{2, {{1, 1}}}, {8, {{1, 10}, {2, 6}}}}, .num_owners = 3});
  EXPECT_EQ(certificate.kind, Kind::kOneOwner);
  EXPECT_EQ(certificate.shape.value(), 1);
  EXPECT_EQ(certificate.bound, 12);  // of four, where three take 16
}

TEST(SimpleBound, AllOwnersTogetherTakeTheSumOfAllShapes) {
  const Certificate certificate =
      bound_of({.shapes = {{3, {{1, 10}}}, {3, {{1, 6}}}, {2, {{1, 1}}}}, .num_owners = 2});
  EXPECT_EQ(certificate.kind, Kind::kAllOwners);
  EXPECT_EQ(certificate.bound, 25);
}

TEST(SimpleBound, OfATieNeedsNoShape) {
  EXPECT_EQ(bound_of({.shapes = {{4, {{1, 10}}}}, .num_owners = 2}).kind, Kind::kAllOwners);
  EXPECT_EQ(bound_of({.shapes = {{1, {{1, 10}}}}, .num_owners = 5}).bound, 10);
}

// Under 40 ns the batch of four is out, and four single ones take 20 ns an owner: that is possible.
TEST(SimpleBound, RunsNothingLongerThanItself) {
  const Instance instance{.shapes = {{8, {{1, 10}, {4, 26}}}}, .num_owners = 4};
  EXPECT_EQ(bound_of(instance).bound, 20);
  EXPECT_EQ(optimum(instance), 20);
}

TEST(SimpleBound, IsProvedTightAndNeverAboveTheOptimum) {
  for (int seed = 0; seed < 1000; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const Instance instance = draw_small(random, 7, 3);
    Certificate certificate = bound_of(instance);
    ASSERT_LE(certificate.bound, optimum(instance)) << "seed " << seed;
    ASSERT_EQ(verify(instance, certificate), "") << "seed " << seed;
    // Neither argument proves more.
    ++certificate.bound;
    for (const Kind kind : {Kind::kOneOwner, Kind::kAllOwners}) {
      certificate.kind = kind;
      for (const ShapeIndex s : instance.shapes.indices()) {
        certificate.shape = s;
        ASSERT_NE(verify(instance, certificate), "") << "seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::balance
