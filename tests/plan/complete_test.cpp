#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "dmuon/plan/plan.h"
#include "tests/plan/message_of.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

// Two of one shape in a batch, one of another.
Plan by_hand() {
  Plan plan;
  plan.mesh = {1, 2};
  plan.inventory = {{"a", {1, 4, 4}, 0}, {"b", {1, 4, 4}, 3}, {"c", {1, 8, 4}, 1}};
  plan.costs = {"by hand", {{{4, 4}, {{1, 5}, {2, 6}}}, {{8, 4}, {{1, 9}}}}};
  plan.owner = oracle::owners({1, 1, 0});
  plan.batches = {oracle::batch(0, {2}), oracle::batch(1, {0, 1})};
  return plan;
}

TEST(Complete, AddsUpLoadsAndKeepsWhatItWasGiven) {
  const Plan before = by_hand();
  Plan plan = before;
  complete(plan);
  EXPECT_EQ(plan.loads_ns, (core::PerOwner<Nanoseconds>{9, 6}));
  EXPECT_EQ(plan.memory.size(), 2U);
  EXPECT_EQ(plan.spread.batch_units, 1.5);
  EXPECT_EQ(plan.owner, before.owner);
  EXPECT_EQ(plan.batches, before.batches);
  Plan again = plan;
  complete(again);
  EXPECT_EQ(again, plan);
}

TEST(Complete, RejectsEveryWayToCorruptAPlan) {
  const std::pair<const char*, std::function<void(Plan&)>> corruptions[] = {
      {"owner must have", [](Plan& p) { p.owner.pop_back(); }},
      {"owner of parameter 'b'", [](Plan& p) { p.owner[ParameterIndex(1)] = Owner(2); }},
      {"owner of parameter 'c'", [](Plan& p) { p.owner[ParameterIndex(2)] = Owner(-1); }},
      {"owner of parameter 'a' must be of column 0",
       [](Plan& p) { p.inventory[ParameterIndex(0)].column = core::Shard(0); }},
      {"'c' must end its leaf in the last of 2 columns",
       [](Plan& p) { p.inventory[ParameterIndex(2)].column = core::Shard(0); }},
      {"own parameters", [](Plan& p) { p.owner[ParameterIndex(1)] = Owner(0); }},
      {"own parameters", [](Plan& p) { p.batches[0].owner = Owner(1); }},
      {"hold a parameter", [](Plan& p) { p.batches.push_back(oracle::batch(1, {})); }},
      {"indices", [](Plan& p) { p.batches[0].parameters[0] = ParameterIndex(3); }},
      {"indices", [](Plan& p) { p.batches[0].parameters[0] = ParameterIndex(-1); }},
      {"ascending",
       [](Plan& p) { std::swap(p.batches[1].parameters[0], p.batches[1].parameters[1]); }},
      {"'c' must be in a batch", [](Plan& p) { p.batches.erase(p.batches.begin()); }},
      {"'b' must be in one batch", [](Plan& p) { p.batches.push_back(oracle::batch(1, {1})); }},
      {"'a' must be in one batch",
       [](Plan& p) {
         p.batches[1] = oracle::batch(1, {0, 0, 1});
       }},
      {"one shape",
       [](Plan& p) {
         p.owner[ParameterIndex(2)] = Owner(1);
         p.batches = {oracle::batch(1, {0, 1, 2})};
       }},
      {"one shape", [](Plan& p) { p.inventory[ParameterIndex(1)].tensor_parallel = true; }},
      {"by owner, then by first", [](Plan& p) { std::swap(p.batches[0], p.batches[1]); }},
      {"by owner, then by first",
       [](Plan& p) {
         p.batches = {oracle::batch(0, {2}), oracle::batch(1, {1}), oracle::batch(1, {0})};
       }},
      {"a batch of 2 of 4 x 4", [](Plan& p) { p.costs.shapes[0].batches.pop_back(); }},
      {"a batch of 1 of 8 x 4", [](Plan& p) { p.costs.shapes.pop_back(); }},
  };
  for (const auto& [expected, corrupt] : corruptions) {
    Plan plan = by_hand();
    corrupt(plan);
    const std::string message = message_of([&, &corrupted = plan] { complete(corrupted); });
    EXPECT_NE(message.find(expected), std::string::npos) << expected << ": " << message;
  }
}

// Batches that are not the cheapest may take any time each.
TEST(Complete, RejectsLoadsThatNoPlanCouldAddUp) {
  Plan plan;
  plan.inventory = oracle::inventory(std::vector<int>(40, 0));
  plan.owner.resize(40);
  plan.costs = {"by hand", {{{1, 1}, {{1, 1}, {2, balance::kMaxTotalNs}}}}};
  for (int w = 0; w < 40; w += 2) plan.batches.push_back(oracle::batch(0, {w, w + 1}));
  EXPECT_NE(message_of([&] { complete(plan); }).find("owner 0 must take at most"),
            std::string::npos);
}

}  // namespace
}  // namespace dmuon::plan
