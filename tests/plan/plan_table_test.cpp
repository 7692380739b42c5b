#include <gtest/gtest.h>

#include "dmuon/plan/complete.h"
#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

// Of 192 MiB of state a matrix, spread over the two ranks of its slot.
Plan by_hand() {
  Plan plan;
  plan.mesh = {2, 1, 2};
  plan.strategy = "by hand";
  plan.options.node_copy = false;
  plan.options.units_in_flight = 1;
  plan.inventory = {
      {"a", 1 << 12, 1 << 12, 0}, {"b", 1 << 12, 1 << 12, 0}, {"c", 1 << 12, 1 << 12, 1}};
  plan.costs = {"by hand", {{{1 << 12, 1 << 12}, {{1, 1'000'000}, {2, 2'500'000}}}}};
  plan.owner = {3, 3, 0};
  plan.batches = {{0, {2}}, {3, {0, 1}}};
  plan.certificate.bound = 2'000'000;
  complete(plan);
  return plan;
}

TEST(PlanTable, ShowsTheSlowestOwnersFirstThenTheBoundTheGapAndTheSpread) {
  EXPECT_EQ(table(by_hand()),
            R"(strategy by hand, mesh 2 x 1, tensor parallel 2, 3 matrices in 2 batches
costs: by hand
 owner  node  column  matrices  batches  state MiB  total MiB  predicted ms
     3     1       0         2        1     192.00    1120.00       2.500
     0     0       0         1        1      96.00     640.00       1.000
     1     0       0         0        0      96.00     256.00       0.000
     2     1       0         0        0     192.00     352.00       0.000
makespan 2.500 ms, no plan is below 2.000 ms, gap 25.00 %
window of 2 units: 1.00 of 1 columns, 2.00 repeats, busiest column 1.00 x the mean
weights of a column: 96.00 to 96.00 MiB
)");
}

TEST(PlanTable, ShowsAtMostMaxRows) {
  const std::string text = table(by_hand(), 1);
  EXPECT_NE(text.find("     3     1       0 "), std::string::npos);
  EXPECT_EQ(text.find("     0     0       0 "), std::string::npos);
  EXPECT_NE(text.find("... and 3 faster owners"), std::string::npos);
  EXPECT_NE(table(by_hand(), -1).find("... and 4 faster owners"), std::string::npos);
  EXPECT_EQ(table(by_hand(), 4).find("..."), std::string::npos);
}

TEST(PlanTable, HasNoGapWithoutWork) {
  const std::string text = table(make_plan({}, {1, 1}, "load_balance", {}));
  EXPECT_EQ(text.find("gap"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::plan
