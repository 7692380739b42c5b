#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "dmuon/plan/plan.h"
#include "dmuon/plan/strategy.h"
#include "tests/plan/message_of.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

using nlohmann::json;

TEST(PlanJson, ReadsBackToAnEqualPlan) {
  balance::Random random(15);
  for (int trial = 0; trial < 12; ++trial) {
    const Case drawn = draw_case(random);
    for (const std::string& strategy : strategy_names()) {
      const Plan plan =
          make_plan(drawn.inventory, drawn.mesh, strategy, drawn.costs, drawn.options);
      const std::string text = to_json(plan);
      const Plan read = from_json(text);
      ASSERT_EQ(read, plan) << strategy << ", trial " << trial;
      EXPECT_EQ(to_json(read), text);
      EXPECT_EQ(hash(read), hash(plan));
    }
  }
}

TEST(PlanJson, ReadsBackEveryKindOfCertificate) {
  using Kind = balance::Certificate::Kind;
  const auto expect = [](const std::vector<int>& shapes, const oracle::Costs& costs, Kind kind) {
    const Plan plan =
        make_plan(oracle::inventory(shapes), {1, 2}, "load_balance", oracle::table(costs));
    EXPECT_EQ(plan.certificate.kind, kind);
    EXPECT_EQ(from_json(to_json(plan)), plan);
  };
  expect({0, 0, 0}, {{7}}, Kind::kOneOwner);
  expect({0, 1, 1}, {{8}, {4}}, Kind::kAllOwners);
  // In ten, nobody has three of the first shape, or a mixture.
  expect({0, 1, 0, 0}, {{5, 6}, {9}}, Kind::kPatterns);
}

TEST(PlanJson, KeepsNamesAndOptionsToTheLastBit) {
  PlanOptions options;
  options.layout_slack = 0.1 + 0.2;
  options.max_memory_bytes = std::numeric_limits<std::int64_t>::max();
  options.reserve_bytes = 3;
  options.lookahead = schedule::kMostUnits;
  options.max_units_in_flight = schedule::kMostUnits;
  options.node_copy = false;
  options.reshard_after_forward = false;
  options.late_updates = true;
  options.replicated = true;
  options.on_cpu = true;
  options.ns_bytes = 4;
  options.ns_steps = 7;
  options.rule = "normuon";
  const Inventory inventory = {{"\"\\\u00e9\n", {1, 3, 5}, std::numeric_limits<int>::max()},
                               {"", {1, 5, 3}, 0}};
  CostTable costs = oracle::modelled(inventory);
  costs.source = "\t\u4e2d";
  const Plan plan = make_plan(inventory, {2, 2}, "load_balance", costs, options);
  EXPECT_EQ(from_json(to_json(plan)), plan);
}

TEST(PlanJson, KeepsLayoutsAndTakesTheirAbsenceForPlainMatrices) {
  const Inventory inventory = {{"plain", {1, 4, 6}, 0},
                               {"blocks", {1, 4, 6, 3}, 0},
                               {"stored transposed", {2, 4, 6, 1, true}, 0},
                               {"both", {2, 4, 6, 3, true}, 0, false, true},
                               {"interleaved", {2, 12, 6, 1, false, {3, 1}}, 0}};
  const Plan plan = make_plan(inventory, {1, 2}, "load_balance", oracle::modelled(inventory));
  EXPECT_EQ(from_json(to_json(plan)), plan);
  const json assignments = json::parse(to_json(plan))["assignments"];
  for (const char* key : {"num_matrices", "continues", "column_blocks", "transposed", "heights"})
    EXPECT_FALSE(assignments[0].contains(key));
  EXPECT_EQ(assignments[3]["column_blocks"], 3);
  EXPECT_EQ(assignments[3]["transposed"], true);
  EXPECT_EQ(assignments[4]["heights"], json({3, 1}));
}

TEST(PlanJson, HasWhatReadersLookFor) {
  const Inventory inventory = oracle::inventory({0, 0, 1});
  const Plan plan =
      make_plan(inventory, {1, 2}, "rank0", oracle::table({{1'000'000, 1'500'000}, {3'000'000}}));
  const json text = json::parse(to_json(plan));
  EXPECT_EQ(text["schema_version"], 4);
  EXPECT_EQ(text["makespan_ms"], 4.5);
  EXPECT_EQ(text["bound_ms"], static_cast<double>(plan.bound_ns()) / 1e6);
  EXPECT_EQ(text["gap"], plan.gap());
  EXPECT_EQ(text["loads_ms"], json({4.5, 0.0}));
  EXPECT_EQ(text["memory_bytes"], json({plan.memory.front().total(), plan.memory.back().total()}));
  EXPECT_EQ(text["assignments"][2]["name"], "m2");
  EXPECT_EQ(text["assignments"][2]["owner"], 0);
  EXPECT_EQ(text["spread"]["distinct_columns"], plan.spread.distinct_columns);
}

TEST(PlanJson, ComputesAgainWhatFollowsFromTheRest) {
  const Plan plan =
      make_plan(oracle::inventory({0, 0, 1}), {1, 2}, "load_balance", oracle::table({{4, 5}, {6}}));
  json text = json::parse(to_json(plan));
  text["makespan_ms"] = "lies";
  text["loads_ms"] = {0, 0};
  text.erase("memory_bytes");
  text.erase("spread");
  EXPECT_EQ(from_json(text.dump()), plan);
}

TEST(PlanJson, NamesThePlaceOfWhatIsWrong) {
  const Plan plan =
      make_plan(oracle::inventory({0, 0, 1}), {1, 2}, "load_balance", oracle::table({{4, 5}, {6}}));
  const json good = json::parse(to_json(plan));
  const std::pair<const char*, std::function<void(json&)>> corruptions[] = {
      {"plan.schema_version", [](json& j) { j["schema_version"] = 3; }},
      {"plan.mesh.num_shards", [](json& j) { j["mesh"]["num_shards"] = 2.0; }},
      {"plan.mesh.num_shards",
       [](json& j) { j["mesh"]["num_shards"] = (std::int64_t{1} << 32) + 2; }},
      {"plan.mesh.num_replicates", [](json& j) { j["mesh"]["num_replicates"] = true; }},
      {"'num_replicates'", [](json& j) { j["mesh"].erase("num_replicates"); }},
      {"num_replicates * num_shards", [](json& j) { j["mesh"]["num_shards"] = 1 << 30; }},
      {"plan.strategy", [](json& j) { j["strategy"] = 3; }},
      {"plan.options.lookahead", [](json& j) { j["options"]["lookahead"] = -1; }},
      {"layout_slack", [](json& j) { j["options"]["layout_slack"] = 1.01; }},
      {"plan.options.weight_bytes", [](json& j) { j["options"]["weight_bytes"] = 9; }},
      {"plan.options.node_copy", [](json& j) { j["options"]["node_copy"] = 1; }},
      {"plan.options.on_cpu", [](json& j) { j["options"]["on_cpu"] = "yes"; }},
      {"plan.options.ns_bytes", [](json& j) { j["options"]["ns_bytes"] = 0; }},
      {"max_units_in_flight", [](json& j) { j["options"]["max_units_in_flight"] = 1; }},
      {"plan.assignments[1].name", [](json& j) { j["assignments"][1]["name"] = 1; }},
      {"'m0' must occur once", [](json& j) { j["assignments"][1]["name"] = "m0"; }},
      {"plan.assignments[0].rows", [](json& j) { j["assignments"][0]["rows"] = 0; }},
      {"plan.assignments[0].column_blocks",
       [](json& j) { j["assignments"][0]["column_blocks"] = true; }},
      {"'m0' must have column_blocks that divide its",
       [](json& j) { j["assignments"][0]["column_blocks"] = 1 << 30; }},
      {"plan.assignments[0].transposed", [](json& j) { j["assignments"][0]["transposed"] = 1; }},
      {"plan.assignments[0].heights[1]",
       [](json& j) {
         j["assignments"][0]["heights"] = json({1, 0});
       }},
      {"'m0' must have two heights or more",
       [](json& j) { j["assignments"][0]["heights"] = json::array({1}); }},
      {"plan.assignments[0].owner", [](json& j) { j["assignments"][0]["owner"] = "0"; }},
      {"owner of parameter 'm0'", [](json& j) { j["assignments"][0]["owner"] = 7; }},
      {"plan.batches", [](json& j) { j["batches"] = nullptr; }},
      {"plan.batches[0]", [](json& j) { j["batches"][0] = 1; }},
      {"'matrices'", [](json& j) { j["batches"][0].erase("matrices"); }},
      {"plan.costs.schema_version", [](json& j) { j["costs"]["schema_version"] = 2; }},
      {"plan.costs.shapes[0].batches[1].ns",
       [](json& j) { j["costs"]["shapes"][0]["batches"][1]["ns"] = -1; }},
      {"got two", [](json& j) { j["costs"]["shapes"].push_back(j["costs"]["shapes"][1]); }},
      {"ascending",
       [](json& j) {
         j["costs"]["shapes"][0]["batches"].push_back({{"size", 2}, {"ns", 5}});
       }},
      {"plan.certificate.kind", [](json& j) { j["certificate"]["kind"] = "trust me"; }},
      {"plan.certificate: expected a proof of 1000 ns",
       [](json& j) {
         j["certificate"] = {{"kind", "all owners"}, {"bound_ns", 1000}};
       }},
      {"plan.certificate: expected a proof of 7 ns",
       [](json& j) {
         j["certificate"] = {{"kind", "one owner"}, {"bound_ns", 7}, {"shape", 1}};
       }},
      {"no such shape",
       [](json& j) {
         j["certificate"] = {{"kind", "one owner"}, {"bound_ns", 1}, {"shape", 2}};
       }},
      {"plan.certificate.cells",
       [](json& j) {
         j["certificate"] = {{"kind", "patterns"},
                             {"bound_ns", 5},
                             {"per_matrix", {1, 1}},
                             {"per_ns", {0, 0}},
                             {"cells", 0}};
       }},
  };
  EXPECT_EQ(from_json(good.dump()), plan);
  for (const auto& [expected, corrupt] : corruptions) {
    json changed = good;
    corrupt(changed);
    const std::string message = message_of([&, &bad = changed] { from_json(bad.dump()); });
    EXPECT_NE(message.find(expected), std::string::npos) << expected << ": " << message;
  }
}

}  // namespace
}  // namespace dmuon::plan
