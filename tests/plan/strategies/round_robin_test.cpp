#include <gtest/gtest.h>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

// By hand from eq:comm-layout on 2 x 4: shard = w mod 4, replicate = (w mod 2) xor (w/4 mod 2).
TEST(RoundRobin, FollowsTheLayoutWhateverTheShapes) {
  const Plan plan =
      make_plan(oracle::inventory({0, 3, 0, 1, 1, 2, 0, 5, 0}), {2, 4}, "round_robin", "cpu");
  EXPECT_EQ(plan.owner, (std::vector<int>{0, 5, 2, 7, 4, 1, 6, 3, 0}));
}

}  // namespace
}  // namespace dmuon::plan
