#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "dmuon/catalog/catalog.h"
#include "dmuon/plan/division.h"
#include "dmuon/plan/plan.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::catalog {
namespace {

constexpr int kGpus = 8;

#ifdef __SANITIZE_ADDRESS__
const std::vector<int> kNodes = {2, 16};  // the code is the same on all of them
#else
const std::vector<int> kNodes = {1, 2, 4, 8, 16, 32};
#endif

class ModelPlans : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(All, ModelPlans, testing::ValuesIn(model_names()), [](const auto& model) {
  std::string name = model.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
});

TEST_P(ModelPlans, OfLoadBalanceAreNeverSlowerThanOthersAndCloseToTheBound) {
  const plan::Inventory whole = model(GetParam()).inventory;
  plan::PlanOptions options;
  options.layout_slack = 0;
  for (const int num_nodes : kNodes) {
    const plan::Mesh mesh{num_nodes, kGpus};
    const plan::Inventory inventory = plan::divide(whole, mesh);
    const plan::CostTable costs =
        plan::modelled_costs(plan::group_by_shape(inventory), device("a800-sxm4-80gb"));
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

// Of 58 to 60 layers' three stacks of 256 or 384 experts, whole ones cannot do that on 256 owners.
TEST(Division, LetsNoOwnerOfALargeMixtureTakeMuchMoreThanTheMean) {
  for (const char* name : {"deepseek-v3", "kimi-k2"}) {
    const plan::Mesh mesh{32, kGpus};
    const auto most_over_mean = [&](const plan::Inventory& inventory) {
      const plan::CostTable costs =
          plan::modelled_costs(plan::group_by_shape(inventory), device("a800-sxm4-80gb"));
      const plan::Plan plan = plan::make_plan(inventory, mesh, "load_balance", costs);
      const auto& loads = plan.loads_ns;
      const double all = std::accumulate(loads.begin(), loads.end(), 0.);
      return static_cast<double>(plan.makespan_ns()) / (all / loads.size());
    };
    const plan::Inventory whole = model(name).inventory;
    EXPECT_GT(most_over_mean(whole), 1.3) << name;
    EXPECT_LE(most_over_mean(plan::divide(whole, mesh)), 1.1) << name;
  }
}

// Of each stack every column has an eighth, which only its 32 ranks may own.
TEST(Division, BalancesMixturesWhoseExpertsAreDividedOverColumns) {
  for (const char* name : {"deepseek-v3", "kimi-k2"}) {
    const plan::Mesh mesh{32, kGpus};
    plan::Inventory columns;
    for (const plan::Parameter& whole : model(name).inventory) {
      plan::Parameter part = whole;
      if (whole.view.num_matrices > 1) part.view.num_matrices /= kGpus;
      for (int column = 0; column < (whole.view.num_matrices > 1 ? kGpus : 1); ++column) {
        const std::int64_t begin = column * part.view.num_matrices;
        if (whole.view.num_matrices > 1) {
          part.name =
              core::message(whole.name, '[', begin, ':', begin + part.view.num_matrices, ']');
          part.continues = column > 0;
          part.column = core::Shard(column);
        }
        columns.push_back(part);
      }
    }
    const plan::Inventory inventory = plan::divide(columns, mesh);
    const plan::CostTable costs =
        plan::modelled_costs(plan::group_by_shape(inventory), device("a800-sxm4-80gb"));
    const plan::Plan plan = plan::make_plan(inventory, mesh, "load_balance", costs);
    std::printf("%-14s by experts: gap %5.2f %%\n", name, plan.gap() * 100);
    EXPECT_LE(plan.gap(), 0.02) << name;
  }
}

// Returns the sum over units of the most that one of `num_places` has, if each unit's matrices go
// to the place with least so far, the largest first. No counts of owners hinder that.
double most_if_free(const plan::Inventory& inventory, int num_places, int weight_bytes) {
  double sum = 0;
  for (const auto& unit : plan::group_by_unit(inventory)) {
    std::vector<std::int64_t> sizes;
    for (const plan::ParameterIndex w : unit) sizes.push_back(inventory[w].num_elements());
    std::sort(sizes.rbegin(), sizes.rend());
    std::vector<std::int64_t> places(static_cast<std::size_t>(num_places));
    for (const std::int64_t size : sizes) *std::min_element(places.begin(), places.end()) += size;
    sum += static_cast<double>(*std::max_element(places.begin(), places.end())) * weight_bytes;
  }
  return sum;
}

TEST_P(ModelPlans, GiveNodesAndColumnsNearlyEqualBytesOfUnits) {
  for (const plan::Mesh mesh : {plan::Mesh{2, 2}, {4, 2}, {2, 8}, {4, 8}, {8, 8}}) {
    const plan::Inventory inventory = plan::divide(model(GetParam()).inventory, mesh);
    const plan::CostTable costs =
        plan::modelled_costs(plan::group_by_shape(inventory), device("a800-sxm4-80gb"));
    const plan::Plan plan = plan::make_plan(inventory, mesh, "load_balance", costs);
    double node = 0;
    double column = 0;
    for (const plan::UnitSpread& unit : plan.spread.units) {
      node += static_cast<double>(unit.most_of_node);
      column += static_cast<double>(unit.most_of_column);
    }
    const auto free = [&](int num_places) {
      return most_if_free(inventory, num_places, plan.options.weight_bytes);
    };
    std::printf("%-14s %d x %d  busiest node %.3f, column %.3f x those without counts\n",
                GetParam().c_str(), mesh.num_replicates, mesh.num_shards,
                node / free(mesh.num_replicates), column / free(mesh.num_shards));
    EXPECT_LE(node, 1.25 * free(mesh.num_replicates));
    EXPECT_LE(column, 1.15 * free(mesh.num_shards));
  }
}

TEST(Placement, LayoutSlackBuysSpreadWhereItIsScarce) {
  const plan::Inventory inventory = model("wall-oss-0.5").inventory;
  const plan::CostTable costs =
      plan::modelled_costs(plan::group_by_shape(inventory), device("a800-sxm4-80gb"));
  plan::PlanOptions tight;
  tight.layout_slack = 0;
  const plan::Plan balanced = plan::make_plan(inventory, {2, kGpus}, "load_balance", costs, tight);
  const plan::Plan spread = plan::make_plan(inventory, {2, kGpus}, "load_balance", costs);
  EXPECT_GE(spread.spread.distinct_columns, balanced.spread.distinct_columns + 0.3);
  EXPECT_LE(spread.makespan_ns(), balanced.makespan_ns() * 1.03);
}

}  // namespace
}  // namespace dmuon::catalog
