#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "dmuon/plan/plan.h"
#include "tests/plan/message_of.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

std::int64_t largest(const Plan& plan) {
  std::int64_t most = 0;
  for (const Memory& one : plan.memory) most = std::max(most, one.total());
  return most;
}

// Up to 16 matrices on up to 4 owners, whose times have nothing to do with their sizes.
Case draw_small(balance::Random& random) {
  Case drawn;
  std::vector<int> shapes(static_cast<std::size_t>(draw(random, 4, 16)));
  for (int& shape : shapes) shape = draw(random, 0, 2) * 5;
  drawn.inventory = oracle::inventory(shapes);
  drawn.mesh = {draw(random, 1, 2), draw(random, 1, 2)};
  oracle::Costs costs(11);
  for (auto& batch_ns : costs) batch_ns = {draw(random, 1, 100)};
  drawn.costs = oracle::table(costs);
  drawn.options.lookahead = 0;
  drawn.options.node_copy = draw(random, 0, 1) == 0;
  return drawn;
}

TEST(MaxMemory, IsKeptOrAnsweredWithANumberThatDoes) {
  balance::Random random(5);
  int num_tighter = 0;
  int num_refused = 0;
  for (int trial = 0; trial < 16; ++trial) {
    const Case drawn = trial % 3 == 0 ? draw_case(random) : draw_small(random);
    for (const char* strategy : {"load_balance", "lpt", "xor_layout"}) {
      const auto plan_within = [&](std::int64_t bytes) {
        PlanOptions options = drawn.options;
        options.max_memory_bytes = bytes;
        return make_plan(drawn.inventory, drawn.mesh, strategy, drawn.costs, options);
      };
      const std::int64_t unlimited = largest(plan_within(0));
      const bool close = draw(random, 0, 1) == 0;
      const std::int64_t cap =
          close ? unlimited - draw(random, 1, 20) : unlimited * draw(random, 60, 100) / 100;
      try {
        EXPECT_LE(largest(plan_within(cap)), cap) << strategy << ", trial " << trial;
        num_tighter += cap < unlimited ? 1 : 0;
      } catch (const core::InvalidArgument& error) {
        const std::int64_t enough = least_named_in(error.what());
        EXPECT_GT(enough, cap);
        EXPECT_LE(enough, unlimited) << "for which there is a plan already";
        EXPECT_LE(largest(plan_within(enough)), enough) << strategy << ", trial " << trial;
        EXPECT_THROW(plan_within(enough - 1), core::InvalidArgument) << "a smaller one would do";
        ++num_refused;
      }
    }
  }
  EXPECT_GT(num_tighter, 2);
  EXPECT_GT(num_refused, 5);
}

// One large matrix and four small ones that are slow: for time alone the first owner of two gets
// the large one and a small one.
TEST(MaxMemory, MovesStateToOwnersThatAreSlowerForIt) {
  Inventory inventory = {{"large", {1, 100, 100}, 0}};
  for (int w = 0; w < 4; ++w) inventory.push_back({core::message("m", w), {1, 10, 10}, 1});
  const CostTable costs = {"by hand", {{{100, 100}, {{1, 10}}}, {{10, 10}, {{1, 10}}}}};
  const Plan free = make_plan(inventory, {1, 2}, "load_balance", costs);
  EXPECT_EQ(free.makespan_ns(), 30);
  const Memory& before = free.memory[free.owner.front()];
  EXPECT_GT(before.state, 12 * 10'000);
  PlanOptions options;
  options.max_memory_bytes = before.total() - before.state + 12 * 10'000;
  const Plan tight = make_plan(inventory, {1, 2}, "load_balance", costs, options);
  EXPECT_EQ(tight.memory[tight.owner.front()].state, 12 * 10'000);
  EXPECT_EQ(tight.makespan_ns(), 40);
  EXPECT_EQ(tight.bound_ns(), free.bound_ns());  // which leaves memory out
}

TEST(MaxMemory, IncludesTheReserve) {
  const Inventory inventory = oracle::inventory({0, 0, 0, 0});
  const CostTable costs = oracle::table({{5}});
  PlanOptions options;
  options.reserve_bytes = 1000;
  const std::int64_t peak = largest(make_plan(inventory, {1, 2}, "xor_layout", costs, options));
  options.max_memory_bytes = peak + 1000;
  EXPECT_EQ(largest(make_plan(inventory, {1, 2}, "xor_layout", costs, options)), peak);
  --options.max_memory_bytes;
  const std::string message = message_of([&] {
    make_plan(inventory, {1, 2}, "xor_layout", costs, options);
  });
  EXPECT_EQ(least_named_in(message), peak + 1000);
  EXPECT_NE(message.find("1000 of them in reserve"), std::string::npos) << message;
}

TEST(MaxMemory, HoldsForCountsMadeElsewhere) {
  const Inventory inventory = oracle::inventory({0, 0, 0, 0});
  const CostTable costs = oracle::table({{5}});
  PlanOptions options;
  const Plan free = make_plan_from_counts(inventory, {1, 2}, "mine", {{3}, {1}}, costs, options);
  options.max_memory_bytes = largest(free);
  EXPECT_EQ(make_plan_from_counts(inventory, {1, 2}, "mine", {{3}, {1}}, costs, options).owner,
            free.owner);
  --options.max_memory_bytes;
  EXPECT_EQ(least_named_in(message_of([&] {
              make_plan_from_counts(inventory, {1, 2}, "mine", {{3}, {1}}, costs, options);
            })),
            largest(free));
}

}  // namespace
}  // namespace dmuon::plan
