#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

// oracle::inventory's shape s is (s + 1) x (s + 1); tables are in order of first appearance.
CostTable table_of(const Inventory& inventory, const oracle::Costs& costs) {
  const ShapeGroups groups = group_by_shape(inventory);
  CostTable table;
  for (std::size_t g = 0; g < groups.shapes.size(); ++g) {
    table.emplace_back(costs[groups.shapes[g].rows - 1], groups.num_matrices[g]);
  }
  return table;
}

TEST(LoadBalance, IsWithinGrahamsBoundOfTheOptimumWhereBatchingGainsNothing) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 300; ++trial) {
    const int num_slots = 1 + trial % 3;
    std::vector<int> shape_of(1 + trial % 6);
    oracle::Costs costs(4);
    for (int& shape : shape_of) shape = std::uniform_int_distribution<int>(0, 3)(random);
    for (auto& batch_seconds : costs) {
      const double one = std::uniform_int_distribution<int>(1, 30)(random);
      batch_seconds = {one, 2 * one, 3 * one};
    }
    const Inventory inventory = oracle::inventory(shape_of);
    const Plan plan =
        make_plan(inventory, {1, num_slots}, "load_balance", table_of(inventory, costs));
    const double optimum = oracle::optimum(shape_of, costs, num_slots);
    EXPECT_LE(plan.lower_bound_s, optimum);
    EXPECT_GE(plan.makespan_s, optimum);
    EXPECT_LE(plan.makespan_s, (4.0 / 3 - 1.0 / (3 * num_slots)) * optimum * (1 + 1e-12));
  }
}

// With c[1] = a + x and c[b] = a + b x, the last matrix dealt to the slowest slot, costing p at
// most, found every slot loaded to makespan - p or more. So makespan <= work / slots + p, where the
// work is at most that of single matrices; and the optimum is at least p, and at least best work /
// slots. Hence makespan <= (1 + single work / best work) * optimum.
TEST(LoadBalance, IsWithinItsListSchedulingBoundOfTheOptimumWhereBatchesShareAFixedCost) {
  std::mt19937 random(12);
  for (int trial = 0; trial < 300; ++trial) {
    const int num_slots = 1 + trial % 3;
    std::vector<int> shape_of(1 + trial % 6);
    oracle::Costs costs(3);
    for (int& shape : shape_of) shape = std::uniform_int_distribution<int>(0, 2)(random);
    for (auto& batch_seconds : costs) {
      const int fixed = std::uniform_int_distribution<int>(0, 20)(random);
      const int each = std::uniform_int_distribution<int>(1, 20)(random);
      for (int b = 1; b <= 4; ++b) batch_seconds.push_back(fixed + b * each);
    }
    double single_work = 0;
    double best_work = 0;
    for (int s = 0; s < 3; ++s) {
      const auto n = static_cast<int>(std::count(shape_of.begin(), shape_of.end(), s));
      single_work += n * costs[s][0];
      best_work += oracle::cheapest_split(costs[s], n);
    }
    const Inventory inventory = oracle::inventory(shape_of);
    const Plan plan =
        make_plan(inventory, {num_slots, 1}, "load_balance", table_of(inventory, costs));
    const double optimum = oracle::optimum(shape_of, costs, num_slots);
    EXPECT_LE(plan.lower_bound_s, optimum);
    EXPECT_GE(plan.makespan_s, optimum);
    EXPECT_LE(plan.makespan_s, (1 + single_work / best_work) * optimum);
  }
}

// Single matrices would be dealt 2 + 2 to every slot, 24, where no one exchange helps. Two slots
// with one batch of four of either shape finish in 14, which the lower bound proves optimal.
TEST(LoadBalance, KeepsBatchesTogetherWhereThatPays) {
  std::vector<int> shape_of;
  for (int w = 0; w < 16; ++w) shape_of.push_back(w % 2);
  const oracle::Costs costs = {{11, 12, 13, 14}, {11, 12, 13, 14}};
  const Inventory inventory = oracle::inventory(shape_of);
  const Plan plan = make_plan(inventory, {1, 4}, "load_balance", table_of(inventory, costs));
  EXPECT_DOUBLE_EQ(plan.makespan_s, 14);
  EXPECT_NEAR(plan.lower_bound_s, 14, 1e-7);
}

TEST(LoadBalance, IsNeverSlowerThanTheAblationsOnAModel) {
  for (const Mesh mesh : {Mesh{1, 8}, Mesh{2, 8}, Mesh{3, 5}, Mesh{8, 8}}) {
    for (const char* kind : {"cpu", "cuda"}) {
      const Inventory inventory = oracle::qwen_7b();
      const double balanced = make_plan(inventory, mesh, "load_balance", kind).makespan_s;
      const double round_robin = make_plan(inventory, mesh, "round_robin", kind).makespan_s;
      EXPECT_LE(balanced, round_robin);
      EXPECT_LE(round_robin, make_plan(inventory, mesh, "rank0", kind).makespan_s);
    }
  }
}

TEST(LoadBalance, SpreadsEqualMatricesLikeTheLayoutAndLeavesSlotsEmptyIfItMust) {
  const Plan plan = make_plan(oracle::inventory({0, 0, 0}), {2, 4}, "load_balance", "cpu");
  EXPECT_EQ(plan.owner, (std::vector<int>{0, 5, 2}));
}

}  // namespace
}  // namespace dmuon::plan
