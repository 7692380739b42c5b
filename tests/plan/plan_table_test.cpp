#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "dmuon/plan/plan.h"

namespace dmuon::plan {
namespace {

const Inventory kInventory = {{"a", 100, 10, 0}, {"b", 100, 10, 0}, {"c", 20, 10, 1}};

TEST(PlanTable, ShowsEverySlotItsBytesOfMasterAndMomentumAndTheGap) {
  const Plan plan = {{2, 1},          "by hand", {0, 0, 1}, {{0, {0, 1}}, {1, {2}}},
                     {0.0025, 0.001}, 0.0025,    0.002};
  EXPECT_EQ(table(plan, kInventory),
            "strategy by hand, mesh 2 x 1, 3 matrices in 2 batches\n"
            "  slot  replicate  shard  matrices       state bytes  predicted ms\n"
            "     0          0      0         2             16000         2.500\n"
            "     1          1      0         1              1600         1.000\n"
            "makespan 2.500 ms, lower bound 2.000 ms, gap 25.00 %\n");
}

TEST(PlanTable, HasNoGapWithoutWork) {
  const std::string text = table(make_plan({}, {1, 1}, "load_balance", "cpu"), {});
  EXPECT_EQ(text.find("gap"), std::string::npos);
}

TEST(PlanTable, RejectsAPlanOfAnotherModel) {
  EXPECT_THROW(table(make_plan(kInventory, {1, 1}, "rank0", "cpu"), {}), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::plan
