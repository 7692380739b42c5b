#include <gtest/gtest.h>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

// By hand from eq:comm-layout on 2 x 4: shard = w mod 4, replicate = (w mod 2) xor (w/4 mod 2).
TEST(XorLayout, FollowsTheLayoutWhateverTheShapes) {
  const Inventory inventory = oracle::inventory({0, 3, 0, 1, 1, 2, 0, 5, 0});
  const Plan plan = make_plan(inventory, {2, 4}, "xor_layout", oracle::modelled(inventory));
  EXPECT_EQ(plan.owner, (std::vector<int>{0, 5, 2, 7, 4, 1, 6, 3, 0}));
}

TEST(XorLayout, TakesTheNextRankOfASlotInTheNextRound) {
  const Inventory inventory = oracle::inventory({0, 0, 0, 0, 0, 0, 0, 0, 0});
  const Plan plan = make_plan(inventory, {2, 2, 2}, "xor_layout", oracle::modelled(inventory));
  // Slots 0 3 2 1, then the other ranks of the same.
  EXPECT_EQ(plan.owner, (std::vector<int>{0, 6, 4, 2, 1, 7, 5, 3, 0}));
}

}  // namespace
}  // namespace dmuon::plan
