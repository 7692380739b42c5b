#include <gtest/gtest.h>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

TEST(Rank0, PutsEverythingOnOwnerZero) {
  const Inventory inventory = oracle::inventory({0, 1, 0, 2});
  const Plan plan = make_plan(inventory, {2, 2, 2}, "rank0", oracle::modelled(inventory));
  EXPECT_EQ(plan.owner, oracle::owners({0, 0, 0, 0}));
}

}  // namespace
}  // namespace dmuon::plan
