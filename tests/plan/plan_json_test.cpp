#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "dmuon/core/error.h"
#include "dmuon/plan/plan.h"
#include "dmuon/plan/strategy.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

using nlohmann::json;

TEST(PlanJson, ReadsBackToAnEqualPlanToTheLastBit) {
  const Inventory inventory = oracle::qwen_7b(3);
  for (const std::string& strategy : strategy_names()) {
    Plan plan = make_plan(inventory, {2, 3}, strategy, "cuda");
    plan.lower_bound_s = std::numeric_limits<double>::denorm_min();
    const Plan read = from_json(to_json(plan), inventory);
    EXPECT_EQ(read, plan);
    EXPECT_EQ(hash(read, inventory), hash(plan, inventory));
  }
  const Plan empty = make_plan({}, {2, 3}, "load_balance", "cpu");
  EXPECT_EQ(from_json(to_json(empty), {}), empty);
}

TEST(PlanJson, RejectsTextThatIsNotAPlan) {
  for (const char* text : {"", "{", "[]", "null", "{}", "3", R"({"format": 2})"}) {
    EXPECT_THROW(from_json(text, {}), core::InvalidArgument) << text;
  }
}

TEST(PlanJson, RejectsValuesOfAnotherTypeOrRangeByName) {
  const Inventory inventory = oracle::inventory({0, 0});
  const json good = json::parse(to_json(make_plan(inventory, {1, 2}, "round_robin", "cpu")));
  const std::pair<const char*, std::function<void(json&)>> corruptions[] = {
      {"format", [](json& j) { j["format"] = 2; }},
      {"num_shards", [](json& j) { j["num_shards"] = 2.0; }},
      {"num_shards", [](json& j) { j["num_shards"] = (std::int64_t{1} << 32) + 2; }},
      {"num_shards", [](json& j) { j["num_shards"] = -(std::int64_t{1} << 32) + 2; }},
      {"num_shards", [](json& j) { j["num_shards"] = ~std::uint64_t{0}; }},
      {"num_replicates", [](json& j) { j["num_replicates"] = true; }},
      {"num_replicates", [](json& j) { j.erase("num_replicates"); }},
      {"strategy", [](json& j) { j["strategy"] = 3; }},
      {"owner",
       [](json& j) {
         j["owner"] = json::object({{"0", 0}});
       }},
      {"owner", [](json& j) { j["owner"][0] = "0"; }},
      {"owner", [](json& j) { j["owner"][0] = 7; }},
      {"batches", [](json& j) { j["batches"] = nullptr; }},
      {"slot", [](json& j) { j["batches"][0] = 1; }},
      {"matrices", [](json& j) { j["batches"][0].erase("matrices"); }},
      {"slot_s", [](json& j) { j["slot_s"][0] = "fast"; }},
      {"makespan_s", [](json& j) { j["makespan_s"] = nullptr; }},
  };
  EXPECT_NO_THROW(from_json(good.dump(), inventory));
  for (const auto& [name, corrupt] : corruptions) {
    json changed = good;
    corrupt(changed);
    try {
      from_json(changed.dump(), inventory);
      ADD_FAILURE() << "accepted: " << changed.dump();
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
}

TEST(PlanJson, RejectsAPlanOfAnotherModel) {
  const std::string text = to_json(make_plan(oracle::inventory({0, 0, 1}), {1, 1}, "rank0", "cpu"));
  EXPECT_THROW(from_json(text, oracle::inventory({0, 0})), core::InvalidArgument);
  EXPECT_THROW(from_json(text, oracle::inventory({0, 1, 0})), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::plan
