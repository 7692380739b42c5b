#include "dmuon/plan/column_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "dmuon/plan/division.h"
#include "tests/plan/message_of.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

// A transformer of which each block has a stack of experts, an equal part of it in each column.
Inventory mixture(int num_blocks, int num_experts, int num_columns) {
  Inventory inventory;
  for (int block = 0; block < num_blocks; ++block) {
    const std::string name = "block." + std::to_string(block);
    inventory.push_back({name + ".proj", {1, 512, 512}, block});
    inventory.push_back({name + ".out", {1, 512, 1024}, block});
    const int part = num_experts / num_columns;
    for (int column = 0; column < num_columns; ++column) {
      const std::string range = core::message("[", column * part, ":", (column + 1) * part, "]");
      inventory.push_back({name + ".experts" + range,
                           {part, 256, 512},
                           block,
                           false,
                           column > 0,
                           core::Shard(column)});
    }
  }
  return inventory;
}

TEST(ColumnParts, HaveOwnersInTheirColumns) {
  for (const Mesh mesh : {Mesh{1, 4}, Mesh{4, 2}, Mesh{3, 4}}) {
    const Inventory inventory = oracle::divide_small(mixture(12, 16, mesh.num_shards), mesh);
    const CostTable costs = oracle::modelled(inventory);
    for (const std::string& strategy : strategy_names()) {
      const Plan plan = make_plan(inventory, mesh, strategy, costs);
      for (const ParameterIndex w : inventory.indices()) {
        EXPECT_EQ(mesh.shard_of(plan.owner[w]),
                  inventory[w].column.value_or(mesh.shard_of(plan.owner[w])));
      }
      EXPECT_EQ(from_json(to_json(plan)), plan);
    }
  }
}

// On one column: no owner has more to do than another and one part more.
TEST(ColumnParts, FillUpWhatTheOthersLeaveUneven) {
  const Mesh mesh{4, 1};
  Inventory inventory = oracle::divide_small(mixture(12, 16, 1), mesh);
  inventory.push_back({"large", {1, 1024, 1024}, 12});
  const CostTable costs = oracle::modelled(inventory);
  const Plan plan = make_plan(inventory, mesh, "rank0", costs);
  Nanoseconds part = 0;
  for (const Parameter& parameter : inventory) {
    if (parameter.column) part = std::max(part, batch_times(costs, parameter.shape()).front().ns);
  }
  // Owner 0 has all the others, which is more than its share.
  const auto [least, most] = std::minmax_element(plan.loads_ns.begin() + 1, plan.loads_ns.end());
  EXPECT_LE(*most - *least, part);
  EXPECT_EQ(plan.makespan_ns(), plan.loads_ns[Owner(0)]);
  for (const ParameterIndex w : inventory.indices())
    EXPECT_EQ(plan.owner[w] == Owner(0), !inventory[w].column) << inventory[w].name;
}

TEST(ColumnParts, LeaveRoomForTheOthersUnderAMemoryLimit) {
  const Mesh mesh{2, 2};
  const Inventory inventory = oracle::divide_small(mixture(6, 8, 2), mesh);
  const CostTable costs = oracle::modelled(inventory);
  PlanOptions options;
  const std::int64_t most = make_plan(inventory, mesh, "rank0", costs).peak_bytes();
  options.max_memory_bytes = 1;
  options.max_memory_bytes = least_named_in(
      message_of([&] { make_plan(inventory, mesh, "load_balance", costs, options); }));
  EXPECT_LT(options.max_memory_bytes, most);
  EXPECT_LE(make_plan(inventory, mesh, "load_balance", costs, options).peak_bytes(),
            options.max_memory_bytes);
}

// A matrix keeps one owner busy, so the other one of its column would get all parts. With a limit
// both get some.
TEST(ColumnParts, GoWhereMemoryHasRoom) {
  const Mesh mesh{2, 2};
  Inventory inventory;
  for (int block = 0; block < 12; ++block) {
    for (const int column : {0, 1}) {
      const std::string name = core::message("block.", block, ".experts of column ", column);
      inventory.push_back({name, {16, 1024, 512}, block, false, column > 0, core::Shard(column)});
    }
  }
  inventory.push_back({"large", {1, 8192, 4096}, 12});
  const CostTable costs = oracle::modelled(inventory);
  PlanOptions options;
  options.on_cpu = true;
  const Plan free = make_plan(inventory, mesh, "load_balance", costs, options);
  options.max_memory_bytes = 1;
  options.max_memory_bytes = least_named_in(
      message_of([&] { make_plan(inventory, mesh, "load_balance", costs, options); }));
  const Plan within = make_plan(inventory, mesh, "load_balance", costs, options);
  const auto most_state = [](const Plan& plan) {
    std::int64_t most = 0;
    for (const Memory& memory : plan.memory) most = std::max(most, memory.state);
    return most;
  };
  EXPECT_LT(most_state(within), most_state(free));
}

TEST(ColumnParts, OfAnotherMeshAreRefusedByName) {
  const Inventory inventory = mixture(1, 8, 4);
  const CostTable costs = oracle::modelled(inventory);
  EXPECT_NE(message_of([&] {
              make_plan(inventory, {1, 2}, "lpt", costs);
            }).find("'block.0.experts[4:6]' must be of a column in [0, 2); got 2"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              make_plan(inventory, {1, 8}, "lpt", costs);
            }).find("'block.0.experts[6:8]' must end its leaf in the last of 8 columns"),
            std::string::npos);
}

TEST(ColumnParts, ChangeThePlansHash) {
  Plan plan = make_plan(mixture(1, 4, 2), {1, 2}, "lpt", oracle::modelled(mixture(1, 4, 2)));
  const std::uint64_t before = hash(plan);
  for (Parameter& parameter : plan.inventory) parameter.column.reset();
  EXPECT_NE(hash(plan), before);
}

// Two parts a block, one in each column. By load alone both would have owners on one node.
TEST(ColumnParts, OfABlockAreOnDifferentNodes) {
  Inventory inventory;
  for (const Parameter& parameter : mixture(8, 4, 2)) {
    if (parameter.column) inventory.push_back(parameter);
  }
  const Plan plan = make_plan(inventory, {2, 2}, "load_balance", oracle::modelled(inventory));
  EXPECT_EQ(plan.loads_ns, core::PerOwner<Nanoseconds>(4, plan.makespan_ns()));
  for (const UnitSpread& unit : plan.spread.units) {
    EXPECT_EQ(unit.most_of_node, unit.least_of_node) << unit.unit;
  }
}

}  // namespace
}  // namespace dmuon::plan
