#include "dmuon/plan/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "dmuon/core/error.h"
#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

// How many matrices of each shape each owner has, in ascending order.
std::vector<std::vector<int>> sorted_counts(const ShapeGroups& groups,
                                            const PerParameter<Owner>& owner, Mesh mesh) {
  std::vector<std::vector<int>> all;
  for (const Owner one : mesh.owners()) {
    PerShape<int> counts(groups.shapes.size());
    for (const ParameterIndex w : owner.indices()) counts[groups.shape_of[w]] += owner[w] == one;
    all.push_back(counts.values());
  }
  std::sort(all.begin(), all.end());
  return all;
}

// Square matrices of one shape, so many a unit.
Inventory equal_units(int num_units, int per_unit) {
  Inventory inventory;
  for (int w = 0; w < num_units * per_unit; ++w) {
    inventory.push_back({core::message("m", w), {1, 8, 8}, w / per_unit});
  }
  return inventory;
}

// Every owner as many, in batches of at most `batch` matrices that take as long as one.
PerParameter<Owner> place_evenly(const Inventory& inventory, Mesh mesh, int batch,
                                 const PlanOptions& options) {
  const int all = inventory.size();
  balance::CostedShape shape{all, {{1, 10}}, 0};
  if (batch > 1) shape.batches.push_back({batch, 10});
  const balance::Problem problem({{shape}, mesh.num_owners()});
  balance::Assignment assignment(problem);
  for (const Owner owner : mesh.owners()) {
    assignment.add(owner, ShapeIndex(0), all / mesh.num_owners());
  }
  return place(inventory, group_by_shape(inventory), assignment, mesh, options);
}

TEST(Place, GivesEveryMatrixAnOwnerAndSomeOwnerTheCountsOfEach) {
  balance::Random random(6);
  for (int trial = 0; trial < 200; ++trial) {
    const Case drawn = draw_case(random);
    const ShapeGroups groups = group_by_shape(drawn.inventory);
    const balance::Problem problem(
        instance_of(groups, drawn.costs, drawn.mesh.num_owners(), "muon"));
    balance::Assignment assignment(problem);
    PerParameter<Owner> drawn_owner;
    const bool lumpy = draw(random, 0, 1) == 0;
    for (const ShapeIndex shape : groups.shape_of) {
      drawn_owner.emplace_back(
          draw(random, 0, lumpy ? drawn.mesh.num_owners() / 3 : drawn.mesh.num_owners() - 1));
      assignment.add(drawn_owner.back(), shape, 1);
    }
    const PerParameter<Owner> owner =
        place(drawn.inventory, groups, assignment, drawn.mesh, drawn.options);
    ASSERT_EQ(owner.size(), drawn.inventory.size());
    for (const Owner one : owner) ASSERT_TRUE(drawn.mesh.owners().contains(one)) << one;
    ASSERT_EQ(sorted_counts(groups, owner, drawn.mesh),
              sorted_counts(groups, drawn_owner, drawn.mesh));
  }
}

// eq:comm-layout's ideal: a window has as many matrices as there are columns, or a multiple.
TEST(Place, ReachesAllColumnsInEveryWindowWhereTheCountsAllowIt) {
  for (const Mesh mesh : {Mesh{4, 8}, Mesh{3, 4}, Mesh{1, 5}, Mesh{5, 1}, Mesh{2, 4, 2}}) {
    for (const int lookahead : {1, 2, 4}) {
      for (const int per_unit : {mesh.num_shards, mesh.num_shards / 2, mesh.num_shards / 4}) {
        if (per_unit == 0 || per_unit * lookahead % mesh.num_shards != 0) continue;
        PlanOptions options;
        options.lookahead = lookahead;
        const Inventory inventory = equal_units(4 * mesh.num_owners(), per_unit);
        const Spread found =
            spread(inventory, mesh, place_evenly(inventory, mesh, 1, options), options);
        const int per_window = per_unit * lookahead;
        EXPECT_EQ(found.distinct_columns, mesh.num_shards) << per_unit << " a unit";
        EXPECT_EQ(found.repeats, per_window - mesh.num_shards);
        EXPECT_EQ(found.busiest_column, 1);
      }
    }
  }
}

TEST(Place, LetsAWindowOfFewMatricesMeetNoColumnTwice) {
  PlanOptions options;
  options.lookahead = 3;
  const Mesh mesh{2, 7};
  const Inventory inventory = equal_units(7 * 4, 2);
  const PerParameter<Owner> owner = place_evenly(inventory, mesh, 1, options);
  const Spread found = spread(inventory, mesh, owner, options);
  EXPECT_EQ(found.repeats, 0);
  EXPECT_EQ(found.distinct_columns, 6);
}

TEST(Place, SpreadsTheMatricesOfAUnitEvenIfTheUnitIsNotContiguous) {
  // Two units of 4, interleaved.
  Inventory inventory;
  for (int w = 0; w < 8; ++w) inventory.push_back({core::message("m", w), {1, 4, 4}, w % 2});
  PlanOptions options;
  options.lookahead = 0;
  const Spread found =
      spread(inventory, {2, 4}, place_evenly(inventory, {2, 4}, 1, options), options);
  EXPECT_EQ(found.distinct_columns, 4);
  EXPECT_EQ(found.repeats, 0);
}

TEST(Place, RotatesNodes) {
  const Mesh mesh{4, 2};
  const Inventory inventory = equal_units(16, 2);
  const PerParameter<Owner> owner = place_evenly(inventory, mesh, 1, {});
  core::PerShard<std::vector<Replicate>> nodes(2);  // in execution order
  for (const Owner one : owner) nodes[mesh.shard_of(one)].push_back(mesh.replicate_of(one));
  for (const std::vector<Replicate>& column : nodes) {
    ASSERT_EQ(column.size(), 16U);
    for (std::size_t i = 0; i + 4 <= column.size(); ++i) {
      EXPECT_EQ(std::set<Replicate>(column.begin() + static_cast<std::ptrdiff_t>(i),
                                    column.begin() + static_cast<std::ptrdiff_t>(i) + 4)
                    .size(),
                4U);
    }
  }
}

// A rank that has begun a batch fills it before another of its column begins one: four units that
// follow each other, not every third.
TEST(Place, KeepsBatchesCloseTogether) {
  const Mesh mesh{3, 2};
  const Inventory inventory = equal_units(24, 2);
  const PerParameter<Owner> owner = place_evenly(inventory, mesh, 4, {});
  for (int w = 0; w + 8 <= owner.size(); w += 8) {
    const Owner first = owner[ParameterIndex(w)];
    const Owner second = owner[ParameterIndex(w + 1)];
    for (int i = 2; i < 8; ++i) {
      const Owner other = owner[ParameterIndex(w + i)];
      EXPECT_EQ(other, mesh.shard_of(first) == mesh.shard_of(other) ? first : second);
    }
  }
  CostTable costs{"by hand", {{{8, 8}, {{1, 10}, {4, 10}}}}};
  const Plan plan = make_plan(inventory, mesh, "load_balance", costs);
  EXPECT_EQ(plan.batches.size(), 12U);
  EXPECT_EQ(plan.spread.batch_units, 3);
}

// However large a lookahead, the answer comes, and is that of a window over all units.
TEST(Place, TakesAnyLookahead) {
  const Inventory inventory = equal_units(12, 3);
  PlanOptions options;
  options.lookahead = 12;
  const PerParameter<Owner> expected = place_evenly(inventory, {2, 3}, 1, options);
  options.lookahead = std::numeric_limits<int>::max();
  EXPECT_EQ(place_evenly(inventory, {2, 3}, 1, options), expected);
  EXPECT_EQ(spread(inventory, {2, 3}, expected, options).distinct_columns, 3);
}

using Counts = core::PerOwner<core::PerShape<int>>;

Counts counts_of(const balance::Assignment& assignment) {
  Counts counts;
  for (const Owner owner : assignment.problem().owners()) {
    counts.push_back(assignment.counts(owner));
  }
  return counts;
}

std::vector<std::vector<int>> sorted(const Counts& counts) {
  std::vector<std::vector<int>> all;
  for (const core::PerShape<int>& of_owner : counts) all.push_back(of_owner.values());
  std::sort(all.begin(), all.end());
  return all;
}

balance::Problem problem_of(const Case& drawn) {
  return balance::Problem(
      instance_of(group_by_shape(drawn.inventory), drawn.costs, drawn.mesh.num_owners(), "muon"));
}

balance::Assignment draw_assignment(balance::Random& random, const balance::Problem& problem) {
  balance::Assignment assignment(problem);
  for (const ShapeIndex s : problem.shapes()) {
    for (int i = 0; i < problem.num_matrices(s); ++i) {
      assignment.add(Owner(draw(random, 0, problem.num_owners() - 1)), s, 1);
    }
  }
  return assignment;
}

// How far the columns are from their even share of each shape, squared and scaled to whole numbers.
std::int64_t unevenness(const Counts& counts, const balance::Problem& problem, Mesh mesh) {
  std::int64_t sum = 0;
  for (const Shard column : mesh.shards()) {
    for (const ShapeIndex s : problem.shapes()) {
      std::int64_t held = 0;
      for (const Owner owner : mesh.owners()) {
        if (mesh.shard_of(owner) == column) held += counts[owner][s];
      }
      const std::int64_t off = held * mesh.num_shards - problem.num_matrices(s);
      sum += off * off;
    }
  }
  return sum;
}

TEST(ColumnsAlike, RenumberOwnersSoThatColumnsAreMoreAlike) {
  balance::Random random(4);
  std::int64_t all_before = 0;
  std::int64_t all_after = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const Case drawn = draw_case(random);
    const balance::Problem problem = problem_of(drawn);
    const balance::Assignment before = draw_assignment(random, problem);
    const balance::Assignment after = columns_alike(before, drawn.mesh);
    ASSERT_EQ(sorted(counts_of(after)), sorted(counts_of(before)));
    all_before += unevenness(counts_of(before), problem, drawn.mesh);
    all_after += unevenness(counts_of(after), problem, drawn.mesh);
  }
  EXPECT_LT(all_after, all_before * 2 / 3);
}

// Two owners that have all of one shape, two that have all of the other, on two columns.
TEST(ColumnsAlike, GiveEveryColumnItsShareOfEachShape) {
  const balance::Problem problem({{{8, {{1, 1}}, 0}, {8, {{1, 1}}, 0}}, 4});
  balance::Assignment assignment(problem);
  assignment.add(Owner(0), ShapeIndex(0), 4);
  assignment.add(Owner(2), ShapeIndex(0), 4);
  assignment.add(Owner(1), ShapeIndex(1), 4);
  assignment.add(Owner(3), ShapeIndex(1), 4);
  const balance::Assignment after = columns_alike(assignment, {2, 2});
  EXPECT_EQ(after.count(Owner(0), ShapeIndex(0)) + after.count(Owner(2), ShapeIndex(0)), 4);
  EXPECT_EQ(after.count(Owner(1), ShapeIndex(0)) + after.count(Owner(3), ShapeIndex(0)), 4);
  EXPECT_EQ(after.count(Owner(0), ShapeIndex(1)) + after.count(Owner(2), ShapeIndex(1)), 4);
}

// As above, a shape being four times the size of the other.
TEST(ColumnsAlike, GiveEveryNodeItsShareOfTheBytes) {
  const balance::Problem problem({{{8, {{1, 1}}, 40}, {8, {{1, 1}}, 10}}, 4});
  balance::Assignment assignment(problem);
  for (const int owner : {0, 1}) assignment.add(Owner(owner), ShapeIndex(0), 4);
  for (const int owner : {2, 3}) assignment.add(Owner(owner), ShapeIndex(1), 4);
  const balance::Assignment after = columns_alike(assignment, {2, 2});
  EXPECT_EQ(after.bytes(Owner(0)) + after.bytes(Owner(1)), 200);
  EXPECT_EQ(after.bytes(Owner(2)) + after.bytes(Owner(3)), 200);
}

// Blocks of a GPT on 2 x 2 ranks, of which two have the matrices `up` and two the matrices `down`,
// in batches. Each node has half of every block, although every batch is of several blocks.
TEST(Place, GivesNodesEqualBytesOfEveryUnit) {
  Inventory inventory;
  for (int block = 0; block < 8; ++block) {
    for (const char* name : {"q", "k", "v", "out"}) {
      inventory.push_back({core::message(block, name), {1, 4, 4}, block});
    }
    inventory.push_back({core::message(block, "up"), {1, 16, 4}, block});
    inventory.push_back({core::message(block, "down"), {1, 4, 16}, block});
  }
  const CostTable costs{
      "by hand",
      {{{4, 4}, {{1, 5}, {8, 16}}}, {{16, 4}, {{1, 10}, {4, 18}}}, {{4, 16}, {{1, 10}, {4, 18}}}}};
  const Plan plan = make_plan_from_counts(inventory, {2, 2}, "by hand",
                                          {{8, 4, 0}, {8, 4, 0}, {8, 0, 4}, {8, 0, 4}}, costs);
  EXPECT_EQ(plan.batches.size(), 8U);
  for (const UnitSpread& unit : plan.spread.units) {
    EXPECT_EQ(unit.most_of_node, unit.least_of_node) << unit.unit;
  }
}

// One node has all large matrices, so the other has fewer bytes of each unit. It must not get all
// its small matrices first, which would leave the late units to the other rank alone.
TEST(Place, LetsNoRankGetAheadOfTheOthersOfItsColumn) {
  Inventory inventory;
  for (int unit = 0; unit < 8; ++unit) {
    inventory.push_back({core::message(unit, "large"), {1, 16, 4}, unit});
    inventory.push_back({core::message(unit, "small"), {1, 4, 4}, unit});
  }
  const CostTable costs{"by hand", {{{16, 4}, {{1, 10}}}, {{4, 4}, {{1, 5}}}}};
  PlanOptions options;
  options.lookahead = 1;  // with windows, exchanges would help
  const Plan plan =
      make_plan_from_counts(inventory, {2, 1}, "by hand", {{8, 4}, {0, 4}}, costs, options);
  int num_early = 0;
  for (int unit = 0; unit < 4; ++unit) {
    num_early += plan.owner[ParameterIndex(2 * unit + 1)] != plan.owner[ParameterIndex(0)] ? 1 : 0;
  }
  EXPECT_EQ(num_early, 3);
}

}  // namespace
}  // namespace dmuon::plan
