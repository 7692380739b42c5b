#include "dmuon/plan/plan.h"

#include <gtest/gtest.h>

#include <functional>

#include "dmuon/core/error.h"
#include "dmuon/plan/strategy.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

const Inventory kSmall = {{"a", 4, 4, 0}, {"b", 4, 4, 0}, {"c", 8, 4, 1}};

TEST(MakePlan, IsValidForEveryStrategyOnEveryMesh) {
  const Inventory inventories[] = {{}, {{"only", 3, 5, 0}}, kSmall, oracle::qwen_7b(3)};
  for (const std::string& strategy : strategy_names()) {
    for (const Inventory& inventory : inventories) {
      for (const Mesh mesh : {Mesh{1, 1}, Mesh{1, 4}, Mesh{4, 1}, Mesh{3, 5}, Mesh{4, 8}}) {
        const Plan plan = make_plan(inventory, mesh, strategy, "cuda");
        EXPECT_NO_THROW(validate(plan, inventory));
        EXPECT_EQ(plan.mesh, mesh);
        EXPECT_EQ(plan.strategy, strategy);
        EXPECT_LE(plan.lower_bound_s, plan.makespan_s);
      }
    }
  }
}

TEST(MakePlan, IsDeterministic) {
  const Inventory inventory = oracle::qwen_7b(5);
  for (const std::string& strategy : strategy_names()) {
    EXPECT_EQ(make_plan(inventory, {3, 8}, strategy, "cuda"),
              make_plan(inventory, {3, 8}, strategy, "cuda"));
  }
}

TEST(MakePlan, BatchesWhatTheCostsSayInRunsOfExecutionOrder) {
  // Three in one batch take as long as one; a batch of another size costs a fortune.
  const Inventory inventory = oracle::inventory({0, 1, 0, 0, 1, 0, 0, 0});
  const CostTable costs = {BatchCosts({50, 90, 1}, 6), BatchCosts({2, 3}, 2)};
  const Plan plan = make_plan(inventory, {1, 1}, "rank0", costs);
  EXPECT_EQ(plan.batches, (std::vector<Batch>{{0, {0, 2, 3}}, {0, {1, 4}}, {0, {5, 6, 7}}}));
  EXPECT_DOUBLE_EQ(plan.makespan_s, 5);
  EXPECT_DOUBLE_EQ(plan.slot_s[0], 5);
}

TEST(MakePlan, BoundsABatchBy64MiB) {
  Inventory inventory;
  for (int w = 0; w < 9; ++w) inventory.push_back({core::message("m", w), 2048, 2048, w});
  for (const Batch& batch : make_plan(inventory, {1, 1}, "rank0", "cpu").batches) {
    EXPECT_LE(batch.matrices.size(), 4U);
  }
}

TEST(MakePlan, RejectsBadArguments) {
  EXPECT_THROW(make_plan(kSmall, {0, 1}, "rank0", "cpu"), core::InvalidArgument);
  EXPECT_THROW(make_plan(kSmall, {1, 1}, "best", "cpu"), core::InvalidArgument);
  EXPECT_THROW(make_plan(kSmall, {1, 1}, "rank0", "tpu"), core::InvalidArgument);
  EXPECT_THROW(make_plan({{"a", 0, 4, 0}}, {1, 1}, "rank0", "cpu"), core::InvalidArgument);
  EXPECT_THROW(make_plan(kSmall, {1, 1}, "rank0", CostTable{}), core::InvalidArgument);
  const CostTable short_table = {BatchCosts({1}, 1), BatchCosts({1}, 1)};  // "a" and "b" are 2
  EXPECT_THROW(make_plan(kSmall, {1, 1}, "rank0", short_table), core::InvalidArgument);
}

TEST(Validate, RejectsEveryWayToCorruptAPlan) {
  const Plan good = make_plan(kSmall, {1, 2}, "rank0", "cpu");
  ASSERT_EQ(good.batches, (std::vector<Batch>{{0, {0, 1}}, {0, {2}}}));
  const std::pair<const char*, std::function<void(Plan&)>> corruptions[] = {
      {"num_shards", [](Plan& p) { p.mesh.num_shards = 0; }},
      {"owner must have", [](Plan& p) { p.owner.pop_back(); }},
      {"owner of matrix 'b'", [](Plan& p) { p.owner[1] = 2; }},
      {"owner of matrix 'c'", [](Plan& p) { p.owner[2] = -1; }},
      {"own matrices", [](Plan& p) { p.owner[1] = 1; }},
      {"own matrices", [](Plan& p) { p.batches[0].slot = 1; }},
      {"hold a matrix",
       [](Plan& p) {
         p.batches.push_back({1, {}});
       }},
      {"indices", [](Plan& p) { p.batches[1].matrices[0] = 3; }},
      {"indices", [](Plan& p) { p.batches[1].matrices[0] = -1; }},
      {"'c' must be in a batch", [](Plan& p) { p.batches.pop_back(); }},
      {"'b' must be in one batch",
       [](Plan& p) {
         p.batches.push_back({0, {1}});
       }},
      {"one shape",
       [](Plan& p) {
         p.batches = {{0, {0, 1, 2}}};
       }},
      {"slot_s", [](Plan& p) { p.slot_s.pop_back(); }},
      {"slot_s", [](Plan& p) { p.slot_s[0] = -1; }},
      {"makespan_s", [](Plan& p) { p.makespan_s = 0.0 / 0.0; }},
      {"lower_bound_s", [](Plan& p) { p.lower_bound_s = -1; }},
  };
  EXPECT_NO_THROW(validate(good, kSmall));
  for (const auto& [message, corrupt] : corruptions) {
    Plan plan = good;
    corrupt(plan);
    try {
      validate(plan, kSmall);
      ADD_FAILURE() << "accepted: " << message;
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  }
}

// The literal was computed by an independent program from the definition in plan.h.
TEST(Hash, IsTheSameOnEveryMachine) {
  const Plan plan = {{1, 2}, "round_robin", {0, 1, 0}, {{0, {0}}, {0, {2}}, {1, {1}}}, {}, 0, 0};
  EXPECT_EQ(hash(plan, kSmall), 0xa021c9ebe834c76fULL);
}

TEST(Hash, ChangesWithEverythingThatMovesDataAndWithNothingElse) {
  const Plan plan = make_plan(kSmall, {2, 2}, "round_robin", "cpu");
  const std::uint64_t before = hash(plan, kSmall);
  const std::function<void(Plan&, Inventory&)> changes[] = {
      [](Plan& p, Inventory&) {
        p.mesh = {1, 4};
      },
      [](Plan& p, Inventory&) { p.strategy = std::string("rank0"); },
      [](Plan& p, Inventory&) { p.owner[2] ^= 1; },
      [](Plan& p, Inventory&) { p.batches[0].slot ^= 1; },
      [](Plan& p, Inventory&) { p.batches[0].matrices[0] ^= 1; },
      [](Plan&, Inventory& i) { i[0].name = std::string("z"); },
      [](Plan&, Inventory& i) { i[0].rows = 5; },
      [](Plan&, Inventory& i) { i[0].cols = 5; },
      [](Plan&, Inventory& i) { i[0].unit = 1; },
  };
  for (const auto& change : changes) {
    Plan changed = plan;
    Inventory inventory = kSmall;
    change(changed, inventory);
    EXPECT_NE(hash(changed, inventory), before);
  }
  Plan slower = plan;
  slower.makespan_s *= 2;
  EXPECT_EQ(hash(slower, kSmall), before);
}

}  // namespace
}  // namespace dmuon::plan
