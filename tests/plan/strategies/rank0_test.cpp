#include <gtest/gtest.h>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

TEST(Rank0, PutsEverythingOnSlotZero) {
  const Plan plan = make_plan(oracle::inventory({0, 1, 0, 2}), {2, 2}, "rank0", "cpu");
  EXPECT_EQ(plan.owner, (std::vector<int>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace dmuon::plan
