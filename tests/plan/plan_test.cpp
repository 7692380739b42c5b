#include "dmuon/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "dmuon/balance/verify.h"
#include "dmuon/core/error.h"
#include "dmuon/plan/strategy.h"
#include "tests/plan/message_of.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

const Inventory kSmall = {{"a", {1, 4, 4}, 0}, {"b", {1, 4, 4}, 0}, {"c", {1, 8, 4}, 1}};

Nanoseconds time_of(const CostTable& costs, const Shape& shape, std::size_t size) {
  for (const ShapeCosts& entry : costs.shapes) {
    if (entry.shape != shape) continue;
    for (const BatchTime& batch : entry.batches) {
      if (batch.size == static_cast<int>(size)) return batch.ns;
    }
  }
  ADD_FAILURE() << "no batch of " << size << " of " << to_string(shape);
  return 0;
}

// Everything that plan.h promises, counted again.
void expect_sound(const Plan& plan) {
  PerParameter<int> seen(plan.inventory.size());
  core::PerOwner<Nanoseconds> loads(plan.mesh.num_owners());
  std::pair previous{Owner(-1), ParameterIndex(-1)};
  for (const Batch& batch : plan.batches) {
    ASSERT_FALSE(batch.parameters.empty());
    EXPECT_TRUE(std::is_sorted(batch.parameters.begin(), batch.parameters.end()));
    EXPECT_TRUE(previous < std::pair(batch.owner, batch.parameters.front()));
    previous = {batch.owner, batch.parameters.front()};
    const Shape shape = plan.inventory[batch.parameters.front()].shape();
    for (const ParameterIndex w : batch.parameters) {
      ++seen[w];
      EXPECT_EQ(plan.owner[w], batch.owner);
      EXPECT_EQ(plan.inventory[w].shape(), shape);
    }
    loads[batch.owner] += time_of(plan.costs, shape, batch.parameters.size());
  }
  EXPECT_EQ(seen, PerParameter<int>(plan.inventory.size(), 1));
  EXPECT_EQ(plan.loads_ns, loads);
  EXPECT_EQ(plan.makespan_ns(), *std::max_element(loads.begin(), loads.end()));
  EXPECT_LE(plan.bound_ns(), plan.makespan_ns());
  EXPECT_EQ(balance::verify(instance_of(group_by_shape(plan.inventory), plan.costs,
                                        plan.mesh.num_owners(), plan.options.rule),
                            plan.certificate),
            "");
  EXPECT_EQ(plan.memory, memory(plan.inventory, plan.mesh, plan.owner, plan.batches, plan.options));
  const Spread spread_found = spread(plan.inventory, plan.mesh, plan.owner, plan.options);
  EXPECT_EQ(plan.spread.distinct_columns, spread_found.distinct_columns);
  EXPECT_EQ(plan.spread.repeats, spread_found.repeats);
  EXPECT_EQ(plan.spread.busiest_column, spread_found.busiest_column);
}

TEST(MakePlan, IsSoundForEveryStrategyWhateverIsPlanned) {
  balance::Random random(7);
  for (int trial = 0; trial < 30; ++trial) {
    const Case drawn = draw_case(random);
    for (const std::string& strategy : strategy_names()) {
      const Plan plan =
          make_plan(drawn.inventory, drawn.mesh, strategy, drawn.costs, drawn.options);
      EXPECT_EQ(plan.mesh, drawn.mesh);
      EXPECT_EQ(plan.strategy, strategy);
      EXPECT_EQ(plan.inventory, drawn.inventory);
      EXPECT_EQ(plan.costs, drawn.costs);
      EXPECT_EQ(plan.options, drawn.options);
      expect_sound(plan);
      if (HasFailure()) FAIL() << strategy << ", trial " << trial;
    }
  }
}

TEST(MakePlan, ChoosesOtherOwnersAtOtherCostsWhereTheStrategyReadsThem) {
  // One shape is dear in one table, the other shape in the other one.
  const Inventory inventory = oracle::inventory({0, 0, 0, 1, 1, 1, 1, 1});
  const auto owners = [&](const std::string& strategy, Nanoseconds first, Nanoseconds second) {
    return make_plan(inventory, {2, 1}, strategy, oracle::table({{first}, {second}})).owner;
  };
  for (const std::string& strategy : strategy_names()) {
    EXPECT_EQ(owners(strategy, 1, 50) != owners(strategy, 50, 1), reads_costs(strategy))
        << strategy;
  }
}

TEST(MakePlan, OfNothingIsAPlan) {
  for (const std::string& strategy : strategy_names()) {
    const Plan plan = make_plan({}, {2, 3}, strategy, {});
    EXPECT_TRUE(plan.batches.empty());
    EXPECT_EQ(plan.makespan_ns(), 0);
    EXPECT_EQ(plan.bound_ns(), 0);
    EXPECT_EQ(plan.gap(), 0);
    EXPECT_EQ(from_json(to_json(plan)), plan);
  }
}

TEST(MakePlan, HasABoundBelowAndAMakespanAboveTheOptimum) {
  balance::Random random(8);
  for (int trial = 0; trial < 150; ++trial) {
    std::vector<int> shapes(static_cast<std::size_t>(draw(random, 1, 6)));
    oracle::Costs costs(3);
    for (int& shape : shapes) shape = draw(random, 0, 2);
    for (auto& batch_ns : costs) {
      for (int b = 1; b <= 4; ++b) batch_ns.push_back(draw(random, 1, 30));
    }
    const Mesh mesh{draw(random, 1, 3), 1};
    const Nanoseconds optimum = oracle::optimum(shapes, costs, mesh.num_owners());
    for (const std::string& strategy : strategy_names()) {
      const Plan plan = make_plan(oracle::inventory(shapes), mesh, strategy, oracle::table(costs));
      EXPECT_LE(plan.bound_ns(), optimum);
      EXPECT_GE(plan.makespan_ns(), optimum);
      // Whoever owns what, it is run in the cheapest batches.
      EXPECT_EQ(plan.makespan_ns(), oracle::makespan(shapes, costs, plan.owner, mesh.num_owners()));
    }
  }
}

TEST(MakePlan, GivesEqualBytesForEqualInput) {
  balance::Random random(9);
  for (int trial = 0; trial < 6; ++trial) {
    const Case drawn = draw_case(random);
    for (const std::string& strategy : strategy_names()) {
      const auto text = [&] {
        return to_json(
            make_plan(drawn.inventory, drawn.mesh, strategy, drawn.costs, drawn.options));
      };
      EXPECT_EQ(text(), text());
    }
  }
}

TEST(MakePlan, BatchesWhatTheCostsSayInRunsOfExecutionOrder) {
  // Three in one batch take as long as one; a batch of another size costs a fortune.
  const Inventory inventory = oracle::inventory({0, 1, 0, 0, 1, 0, 0, 0});
  const CostTable costs = oracle::table({{50, 90, 1}, {2, 3}});
  const Plan plan = make_plan(inventory, {1, 1}, "rank0", costs);
  EXPECT_EQ(plan.batches, (std::vector<Batch>{oracle::batch(0, {0, 2, 3}), oracle::batch(0, {1, 4}),
                                              oracle::batch(0, {5, 6, 7})}));
  EXPECT_EQ(plan.loads_ns, core::PerOwner<Nanoseconds>{5});
  // Units 0 to 1, 0 to 2, 2 to 3.
  EXPECT_DOUBLE_EQ(plan.spread.batch_units, 4.0 / 3);
}

TEST(MakePlan, KeepsMatricesOverTensorParallelRanksInBatchesOfTheirOwn) {
  const Inventory inventory = {{"a", {1, 1, 1}, 0}, {"b", {1, 1, 1}, 0, true}, {"c", {1, 1, 1}, 0}};
  const CostTable costs = {"by hand",
                           {{{1, 1, true}, {{1, 7}}}, {{1, 1, false}, {{1, 5}, {2, 6}}}}};
  const Plan plan = make_plan(inventory, {1, 1, 2}, "rank0", costs);
  EXPECT_EQ(plan.batches, (std::vector<Batch>{oracle::batch(0, {0, 2}), oracle::batch(0, {1})}));
  EXPECT_EQ(plan.loads_ns, (core::PerOwner<Nanoseconds>{13, 0}));
}

TEST(MakePlan, NamesTheFirstBadArgument) {
  const CostTable costs = oracle::modelled(kSmall);
  const auto of = [&](const Inventory& inventory, Mesh mesh, const char* strategy,
                      const CostTable& table) {
    return message_of([&] { make_plan(inventory, mesh, strategy, table); });
  };
  EXPECT_EQ(of(kSmall, {1, 1}, "rank0", costs), "");
  EXPECT_NE(of(kSmall, {0, 1}, "rank0", costs).find("num_replicates"), std::string::npos);
  EXPECT_NE(of(kSmall, {1, 1}, "best", costs).find("'best'"), std::string::npos);
  EXPECT_NE(of({{"a", {1, 0, 4}, 0}}, {1, 1}, "rank0", costs).find("'a'"), std::string::npos);
  EXPECT_NE(of(kSmall, {1, 1}, "rank0", {}).find("4 x 4"), std::string::npos);
}

TEST(MakePlan, NamesABadOption) {
  const std::pair<const char*, std::function<void(PlanOptions&)>> bad[] = {
      {"lookahead", [](PlanOptions& o) { o.lookahead = -1; }},
      {"layout_slack", [](PlanOptions& o) { o.layout_slack = -0.1; }},
      {"layout_slack", [](PlanOptions& o) { o.layout_slack = 1.5; }},
      {"layout_slack", [](PlanOptions& o) { o.layout_slack = std::nan(""); }},
      {"max_memory_bytes", [](PlanOptions& o) { o.max_memory_bytes = -1; }},
      {"reserve_bytes", [](PlanOptions& o) { o.reserve_bytes = -1; }},
      {"weight_bytes", [](PlanOptions& o) { o.weight_bytes = 0; }},
      {"gradient_bytes", [](PlanOptions& o) { o.gradient_bytes = 9; }},
      {"lookahead", [](PlanOptions& o) { o.lookahead = schedule::kMostUnits + 1; }},
      {"max_units_in_flight", [](PlanOptions& o) { o.max_units_in_flight = 1; }},
      {"max_units_in_flight",
       [](PlanOptions& o) { o.max_units_in_flight = schedule::kMostUnits + 1; }},
      {"ns_bytes", [](PlanOptions& o) { o.ns_bytes = 0; }},
      {"ns_steps", [](PlanOptions& o) { o.ns_steps = -1; }},
      {"rule", [](PlanOptions& o) { o.rule = "another"; }},
  };
  const CostTable costs = oracle::modelled(kSmall);
  for (const auto& [name, spoil] : bad) {
    PlanOptions options;
    spoil(options);
    const std::string message = message_of([&] {
      make_plan(kSmall, {1, 1}, "rank0", costs, options);
    });
    EXPECT_NE(message.find(name), std::string::npos) << name << ": " << message;
  }
}

TEST(Gap, IsTheShareAboveTheBound) {
  Plan plan;
  EXPECT_EQ(plan.gap(), 0);
  plan.loads_ns = {5, 12, 3};
  plan.certificate.bound = 10;
  EXPECT_EQ(plan.makespan_ns(), 12);
  EXPECT_DOUBLE_EQ(plan.gap(), 0.2);
  plan.certificate.bound = 0;
  EXPECT_EQ(plan.gap(), std::numeric_limits<double>::infinity());
}

TEST(RequireFit, NamesTheFirstDifference) {
  const Plan plan = make_plan(kSmall, {2, 2}, "rank0", oracle::modelled(kSmall));
  EXPECT_NO_THROW(require_fit(plan, kSmall, {2, 2}));
  const auto of = [&](const Inventory& inventory, Mesh mesh) {
    return message_of([&] { require_fit(plan, inventory, mesh); });
  };
  EXPECT_EQ(of(kSmall, {2, 2, 3}), "plan: mesh: expected 2 x 2 x 3, the plan is for 2 x 2 x 1");
  EXPECT_EQ(of(kSmall, {1, 4}), "plan: mesh: expected 1 x 4 x 1, the plan is for 2 x 2 x 1");
  const auto changed = [&](const std::function<void(Inventory&)>& change) {
    Inventory inventory = kSmall;
    change(inventory);
    return of(inventory, {2, 2});
  };
  EXPECT_EQ(changed([](Inventory& i) { i[ParameterIndex(1)].name = "z"; }),
            "plan: parameter 1: expected 'z', 4 x 4, unit 0; the plan has 'b', 4 x 4, unit 0");
  EXPECT_NE(changed([](Inventory& i) { i[ParameterIndex(2)].view.rows = 9; }).find("parameter 2"),
            std::string::npos);
  EXPECT_NE(changed([](Inventory& i) { i[ParameterIndex(0)].view.cols = 9; }).find("parameter 0"),
            std::string::npos);
  EXPECT_NE(changed([](Inventory& i) { i[ParameterIndex(0)].unit = 9; }).find("unit 9"),
            std::string::npos);
  EXPECT_NE(
      changed([](Inventory& i) { i[ParameterIndex(0)].tensor_parallel = true; }).find("over TP"),
      std::string::npos);
  EXPECT_EQ(changed([](Inventory& i) {
              i[ParameterIndex(1)].view.column_blocks = 2;
              i[ParameterIndex(1)].view.transposed = true;
            }),
            "plan: parameter 1: expected 'b', 4 x 2*2 transposed, unit 0; the plan has 'b', 4 x 4, "
            "unit 0");
  EXPECT_EQ(changed([](Inventory& i) { i.pop_back(); }),
            "plan: expected 2 parameters; the plan has 3");
  EXPECT_EQ(changed([](Inventory& i) {
              i.push_back({"d", {1, 1, 1}, 1});
            }),
            "plan: expected 4 parameters; the plan has 3");
}

// The literal was computed by an independent program from the definition in plan.h.
TEST(Hash, IsTheSameOnEveryMachine) {
  Plan plan;
  plan.mesh = {1, 2, 3};
  plan.inventory = kSmall;
  plan.owner = oracle::owners({0, 1, 0});
  plan.batches = {oracle::batch(0, {0}), oracle::batch(0, {2}), oracle::batch(1, {1})};
  EXPECT_EQ(hash(plan), 0x67379c6c9a890a3fULL);
}

TEST(Hash, ChangesWithEverythingThatMovesDataAndWithNothingElse) {
  const Plan plan = make_plan(kSmall, {2, 2}, "round_robin", oracle::modelled(kSmall));
  const std::uint64_t before = hash(plan);
  const std::function<void(Plan&)> changes[] = {
      [](Plan& p) {
        p.mesh = {1, 4};
      },
      [](Plan& p) { p.mesh.tensor_parallel = 2; },
      [](Plan& p) { p.owner[ParameterIndex(2)] = Owner(3); },
      [](Plan& p) { p.batches[0].owner = Owner(3); },
      [](Plan& p) { p.batches[0].parameters[0] = ParameterIndex(1); },
      [](Plan& p) { p.batches.pop_back(); },
      [](Plan& p) { p.inventory[ParameterIndex(0)].name = "z"; },
      [](Plan& p) { p.inventory[ParameterIndex(0)].view.rows = 5; },
      [](Plan& p) { p.inventory[ParameterIndex(0)].view.cols = 5; },
      [](Plan& p) { p.inventory[ParameterIndex(0)].unit = 1; },
      [](Plan& p) { p.inventory[ParameterIndex(0)].tensor_parallel = true; },
      [](Plan& p) { p.inventory[ParameterIndex(0)].view.column_blocks = 2; },
      [](Plan& p) { p.inventory[ParameterIndex(0)].view.transposed = true; },
      [](Plan& p) {
        p.inventory[ParameterIndex(0)].view.heights = {1, 2};
      },
  };
  for (const auto& change : changes) {
    Plan changed = plan;
    change(changed);
    EXPECT_NE(hash(changed), before);
  }
  Plan same = plan;
  same.strategy = "other";
  same.loads_ns[Owner(0)] *= 2;
  same.costs = {};
  same.certificate = {};
  same.options.lookahead = 7;
  EXPECT_EQ(hash(same), before);
}

}  // namespace
}  // namespace dmuon::plan
