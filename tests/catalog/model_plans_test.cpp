#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "dmuon/catalog/catalog.h"
#include "dmuon/plan/plan.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::catalog {
namespace {

constexpr int kGpus = 8;

// Sanitizers make the largest models slow; what they check is in the small ones.
#ifdef __SANITIZE_ADDRESS__
const std::vector<int> kNodes = {2};
constexpr int kMaxMatrices = 1000;
#else
const std::vector<int> kNodes = {1, 2, 4, 8, 16, 32};
constexpr int kMaxMatrices = 100'000;
#endif
// A model is large with more matrices than that; its plans take seconds.
constexpr int kLarge = 10'000;
const std::vector<int> kNodesOfLarge = {4, 32};

class ModelPlans : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(All, ModelPlans, testing::ValuesIn(model_names()), [](const auto& model) {
  std::string name = model.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
});

TEST_P(ModelPlans, OfLoadBalanceAreNeverSlowerThanOthersAndCloseToTheBound) {
  const plan::Inventory inventory = model(GetParam()).inventory;
  if (inventory.size() > kMaxMatrices) GTEST_SKIP();
  const plan::CostTable costs =
      plan::modelled_costs(plan::group_by_shape(inventory), device("a800-sxm4-80gb"));
  plan::Options options;
  options.layout_slack = 0;
  for (const int num_nodes : inventory.size() > kLarge ? kNodesOfLarge : kNodes) {
    const plan::Mesh mesh{num_nodes, kGpus};
    const plan::Plan balanced = plan::make_plan(inventory, mesh, "load_balance", costs, options);
    std::printf("%-14s %2d x %d  makespan %10.3f ms, gap %5.2f %%\n", GetParam().c_str(), num_nodes,
                kGpus, static_cast<double>(balanced.makespan_ns()) / 1e6, balanced.gap() * 100);
    EXPECT_LE(balanced.gap(), 0.01);
    const plan::Plan by_default = plan::make_plan(inventory, mesh, "load_balance", costs);
    const auto slower = std::max(balanced.makespan_ns(), by_default.makespan_ns());
    for (const std::string& strategy : plan::strategy_names()) {
      if (strategy == "load_balance") continue;
      const plan::Plan other = plan::make_plan(inventory, mesh, strategy, costs, options);
      EXPECT_LE(slower, other.makespan_ns()) << strategy << " on " << num_nodes;
      EXPECT_LE(balanced.bound_ns(), other.makespan_ns()) << strategy << " on " << num_nodes;
    }
  }
}

TEST(Placement, LayoutSlackBuysSpreadWhereItIsScarce) {
  const plan::Inventory inventory = model("wall-oss-0.5").inventory;
  const plan::CostTable costs =
      plan::modelled_costs(plan::group_by_shape(inventory), device("a800-sxm4-80gb"));
  plan::Options tight;
  tight.layout_slack = 0;
  const plan::Plan balanced = plan::make_plan(inventory, {2, kGpus}, "load_balance", costs, tight);
  const plan::Plan spread = plan::make_plan(inventory, {2, kGpus}, "load_balance", costs);
  EXPECT_GE(spread.spread.distinct_columns, balanced.spread.distinct_columns + 0.3);
  EXPECT_LE(spread.makespan_ns(), balanced.makespan_ns() * 1.03);
}

}  // namespace
}  // namespace dmuon::catalog
