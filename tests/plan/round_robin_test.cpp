#include <gtest/gtest.h>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

TEST(RoundRobin, GoesFromOwnerToOwnerWhateverTheShapes) {
  const Inventory inventory = oracle::inventory({0, 3, 0, 1, 1, 2, 0, 5, 0});
  const CostTable costs = oracle::modelled(inventory);
  EXPECT_EQ(make_plan(inventory, {2, 2}, "round_robin", costs).owner,
            oracle::owners({0, 1, 2, 3, 0, 1, 2, 3, 0}));
  EXPECT_EQ(make_plan(inventory, {1, 2, 3}, "round_robin", costs).owner,
            oracle::owners({0, 1, 2, 3, 4, 5, 0, 1, 2}));
}

}  // namespace
}  // namespace dmuon::plan
