#include <gtest/gtest.h>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

// Loads 5 5 4 4 3 3 3 on 3 owners: optimum 9, LPT 11, exactly Graham's bound (1969).
TEST(Lpt, IsElevenOnGrahamsWorstCase) {
  const Inventory inventory = oracle::inventory({0, 0, 1, 1, 2, 2, 2});
  const CostTable costs = oracle::table({{5}, {4}, {3}});
  const Plan plan = make_plan(inventory, {1, 3}, "lpt", costs);
  EXPECT_EQ(plan.makespan_ns(), 11);
  EXPECT_EQ(make_plan(inventory, {1, 3}, "load_balance", costs).makespan_ns(), 9);
}

// Two of a shape together take as long as one, but it deals them out by their single times.
TEST(Lpt, KnowsNothingOfBatchesWhenItDecides) {
  const Inventory inventory = oracle::inventory({0, 0, 1, 1});
  const CostTable costs = oracle::table({{10, 10}, {9, 9}});
  EXPECT_EQ(make_plan(inventory, {1, 2}, "lpt", costs).makespan_ns(), 19);
  EXPECT_EQ(make_plan(inventory, {1, 2}, "load_balance", costs).makespan_ns(), 10);
}

TEST(Lpt, IsWithinGrahamsBoundOfTheOptimumWhereBatchingGainsNothing) {
  balance::Random random(11);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<int> shape_of(static_cast<std::size_t>(draw(random, 1, 7)));
    oracle::Costs costs(4);
    for (int& shape : shape_of) shape = draw(random, 0, 3);
    for (auto& batch_ns : costs) batch_ns = {draw(random, 1, 30)};
    const int num_owners = draw(random, 1, 3);
    const Plan plan =
        make_plan(oracle::inventory(shape_of), {1, num_owners}, "lpt", oracle::table(costs));
    // 4/3 - 1/(3 owners)
    EXPECT_LE(3 * num_owners * plan.makespan_ns(),
              (4 * num_owners - 1) * oracle::optimum(shape_of, costs, num_owners));
  }
}

}  // namespace
}  // namespace dmuon::plan
