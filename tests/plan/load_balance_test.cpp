#include <gtest/gtest.h>

#include <algorithm>

#include "dmuon/plan/plan.h"
#include "dmuon/plan/strategy.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

Plan with_slack(const Case& drawn, double slack) {
  PlanOptions options = drawn.options;
  options.layout_slack = slack;
  return make_plan(drawn.inventory, drawn.mesh, "load_balance", drawn.costs, options);
}

TEST(LoadBalance, FindsTheOptimumOfSmallInstances) {
  balance::Random random(12);
  int num_missed = 0;
  for (int trial = 0; trial < 150; ++trial) {
    std::vector<int> shape_of(static_cast<std::size_t>(draw(random, 1, 6)));
    oracle::Costs costs(3);
    for (int& shape : shape_of) shape = draw(random, 0, 2);
    for (auto& batch_ns : costs) {
      const int fixed = draw(random, 0, 20);
      const int each = draw(random, 1, 20);
      for (int b = 1; b <= 4; ++b) batch_ns.push_back(fixed + b * each);
    }
    const int num_owners = draw(random, 1, 3);
    const Plan plan = make_plan(oracle::inventory(shape_of), {1, num_owners}, "load_balance",
                                oracle::table(costs));
    const Nanoseconds optimum = oracle::optimum(shape_of, costs, num_owners);
    num_missed += plan.makespan_ns() > optimum ? 1 : 0;
    EXPECT_LE(plan.makespan_ns(), optimum + optimum / 5);
  }
  EXPECT_LE(num_missed, 2);
}

// Single matrices would be dealt 2 + 2 to every owner, 24, where no one exchange helps. Two owners
// with one batch of four of either shape finish in 14, which the bound proves optimal.
TEST(LoadBalance, KeepsBatchesTogetherWhereThatPays) {
  std::vector<int> shape_of;
  for (int w = 0; w < 16; ++w) shape_of.push_back(w % 2);
  const CostTable costs = oracle::table({{11, 12, 13, 14}, {11, 12, 13, 14}});
  const Plan plan = make_plan(oracle::inventory(shape_of), {1, 4}, "load_balance", costs);
  EXPECT_EQ(plan.makespan_ns(), 14);
  EXPECT_EQ(plan.bound_ns(), 14);
}

TEST(LoadBalance, IsNeverSlowerThanAnyOtherWhateverTheSlack) {
  balance::Random random(13);
  for (int trial = 0; trial < 12; ++trial) {
    const Case drawn = draw_case(random);
    Nanoseconds balanced = 0;
    for (const double slack : {0.0, 0.03, 0.5}) {
      balanced = std::max(balanced, with_slack(drawn, slack).makespan_ns());
    }
    for (const std::string& strategy : strategy_names()) {
      const Plan other =
          make_plan(drawn.inventory, drawn.mesh, strategy, drawn.costs, drawn.options);
      if (strategy == "load_balance") continue;
      EXPECT_LE(balanced, other.makespan_ns()) << strategy << ", trial " << trial;
    }
  }
}

// The search ends within a thousandth of the bound, which dealing in turn meets here.
TEST(LoadBalance, IsNotSlowerThanDealingInTurnByAThousandthEither) {
  const std::vector<int> shape_of = {0, 0, 1, 2, 1, 2, 3, 2};
  const CostTable costs = oracle::table({{1'000'000}, {300}, {200}, {0}});
  for (const Mesh mesh : {Mesh{1, 2}, Mesh{2, 1}}) {
    const Plan plan = make_plan(oracle::inventory(shape_of), mesh, "load_balance", costs);
    EXPECT_EQ(plan.makespan_ns(), 1'000'600);
  }
}

TEST(LoadBalance, GivesUpNoMoreThanTheSlackAndOnlyForASpreadThatIsNoWorse) {
  balance::Random random(14);
  for (int trial = 0; trial < 40; ++trial) {
    const Case drawn = draw_case(random);
    const Plan tight = with_slack(drawn, 0);
    for (const double slack : {0.03, 0.5}) {
      const Plan loose = with_slack(drawn, slack);
      EXPECT_LE(static_cast<double>(loose.makespan_ns()),
                static_cast<double>(tight.makespan_ns()) * (1 + slack) + 1e-6);
      EXPECT_GE(loose.spread.distinct_columns, tight.spread.distinct_columns - 1e-12);
      EXPECT_EQ(loose.bound_ns(), tight.bound_ns());
      if (loose.owner != tight.owner) {
        EXPECT_GT(loose.spread.distinct_columns, tight.spread.distinct_columns);
        EXPECT_GT(drawn.mesh.num_replicates, 1) << "columns share no network on one node";
      }
    }
  }
}

// A batch of four takes 10, of one 11: two owners finish in 10, all of them in 11 on all columns.
TEST(LoadBalance, TakesASpreadThatCostsNoMoreThanTheSlack) {
  Case drawn;
  drawn.inventory = oracle::inventory({0, 0, 0, 0, 0, 0, 0, 0});
  drawn.mesh = {2, 4};
  drawn.costs = {"by hand", {{{1, 1}, {{1, 11'000}, {4, 10'000}}}}};
  for (const double slack : {0.0, 0.03, 0.0999}) {
    EXPECT_EQ(with_slack(drawn, slack).makespan_ns(), 10'000);
    EXPECT_EQ(with_slack(drawn, slack).spread.distinct_columns, 2);
  }
  for (const double slack : {0.1001, 0.5}) {
    EXPECT_EQ(with_slack(drawn, slack).makespan_ns(), 11'000);
    EXPECT_EQ(with_slack(drawn, slack).spread.distinct_columns, 4);
  }
  drawn.mesh = {1, 8};
  EXPECT_EQ(with_slack(drawn, 0.5).makespan_ns(), 10'000) << "columns share no network on one node";
}

TEST(LoadBalance, LeavesOwnersEmptyIfItMust) {
  const Plan plan =
      make_plan(oracle::inventory({0, 0, 0}), {2, 4}, "load_balance", oracle::table({{7, 7, 7}}));
  EXPECT_EQ(plan.makespan_ns(), 7);
  const Plan single =
      make_plan(oracle::inventory({0, 0, 0}), {2, 4}, "load_balance", oracle::table({{7}}));
  EXPECT_EQ(single.makespan_ns(), 7);
  EXPECT_EQ(std::count(single.loads_ns.begin(), single.loads_ns.end(), 7), 3);
}

}  // namespace
}  // namespace dmuon::plan
