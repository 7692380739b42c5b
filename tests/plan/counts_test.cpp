#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "dmuon/plan/plan.h"
#include "tests/plan/message_of.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

using Counts = core::PerOwner<core::PerShape<int>>;

// Three matrices of one shape and one of another.
const Inventory kInventory = oracle::inventory({0, 1, 0, 0});

TEST(MakePlanFromCounts, IsThePlanOfTheseCounts) {
  const CostTable costs = oracle::table({{5, 6}, {9}});
  const Plan plan = make_plan_from_counts(kInventory, {1, 2}, "mine", {{2, 0}, {1, 1}}, costs);
  EXPECT_EQ(plan.strategy, "mine");
  EXPECT_EQ(plan.makespan_ns(), 14);
  std::vector<Nanoseconds> loads = plan.loads_ns.values();
  std::sort(loads.begin(), loads.end());
  EXPECT_EQ(loads, (std::vector<Nanoseconds>{6, 14}));
  EXPECT_EQ(plan.bound_ns(), 11);  // within 10, nobody has three of the first shape, or a mixture
  EXPECT_EQ(from_json(to_json(plan)), plan);
}

TEST(MakePlanFromCounts, RejectsCountsThatDoNotAddUp) {
  const CostTable costs = oracle::table({{5, 6}, {9}});
  const auto of = [&](const Counts& counts) {
    return message_of([&] { make_plan_from_counts(kInventory, {1, 2}, "mine", counts, costs); });
  };
  EXPECT_EQ(of({{3, 1}, {0, 0}}), "");
  EXPECT_EQ(of({{3, 1}}), "make_plan: counts must have a row for each of 2 owners; got 1");
  EXPECT_EQ(of({{3, 1}, {0}}),
            "make_plan: counts of owner 1 must have an entry for each of 2 shapes; got 1");
  EXPECT_EQ(of({{2, 1}, {0, 0}}), "make_plan: counts of 1 x 1 must add up to 3; got 2");
  EXPECT_EQ(of({{3, 1}, {0, 1}}),
            "make_plan: counts of 2 x 2 must be >= 0 and add up to 1; got 1 for owner 1");
  EXPECT_EQ(of({{4, 1}, {-1, 0}}),
            "make_plan: counts of 1 x 1 must be >= 0 and add up to 3; got 4 for owner 0");
  EXPECT_EQ(of({{-1, 1}, {4, 0}}),
            "make_plan: counts of 1 x 1 must be >= 0 and add up to 3; got -1 for owner 0");
  constexpr int kMost = std::numeric_limits<int>::max();
  EXPECT_NE(of({{kMost, 1}, {kMost, 0}}), "");
  EXPECT_NE(of({{-kMost - 1, 1}, {kMost, 0}}), "");
}

}  // namespace
}  // namespace dmuon::plan
