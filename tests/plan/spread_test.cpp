#include "dmuon/plan/spread.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

struct Placed {
  Inventory inventory;
  int num_columns;
  PerParameter<Shard> columns;
  PerParameter<int> places;  // of units, by first appearance
  int num_units;
};

Placed draw_placed(balance::Random& random) {
  Placed placed{draw_case(random).inventory, draw(random, 1, 9), {}, {}, 0};
  std::map<int, int> place_of;
  for (const Parameter& matrix : placed.inventory) {
    placed.columns.push_back(Shard(draw(random, 0, placed.num_columns - 1)));
    const auto next = static_cast<int>(place_of.size());
    placed.places.push_back(place_of.emplace(matrix.unit, next).first->second);
  }
  placed.num_units = static_cast<int>(place_of.size());
  return placed;
}

// On one node.
Spread spread_of(const Inventory& inventory, int num_columns, const PerParameter<Shard>& columns,
                 int window) {
  const Mesh mesh{1, num_columns};
  PerParameter<Owner> owner;
  for (const Shard column : columns) owner.push_back(mesh.owner_at(Replicate(0), column, 0));
  PlanOptions options;
  options.lookahead = window;
  return spread(inventory, mesh, owner, options);
}

TEST(Spread, IsWhatARecountFromTheDefinitionGives) {
  balance::Random random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const Placed placed = draw_placed(random);
    const int window = draw(random, 1, 6);
    const int length = std::min(window, placed.num_units);
    const int num_windows = placed.num_units - length + 1;
    Spread expected;
    for (int first = 0; first < num_windows; ++first) {
      std::map<Shard, double> elements;
      double all = 0;
      int num_matrices = 0;
      for (const ParameterIndex w : placed.columns.indices()) {
        if (placed.places[w] < first || placed.places[w] >= first + length) continue;
        const Parameter& parameter = placed.inventory[w];
        const auto size = static_cast<double>(parameter.num_elements());
        elements[placed.columns[w]] += size;
        all += size;
        ++num_matrices;
      }
      double most = 0;
      for (const auto& [column, size] : elements) most = std::max(most, size);
      expected.distinct_columns += static_cast<double>(elements.size()) / num_windows;
      expected.repeats +=
          static_cast<double>(num_matrices - static_cast<int>(elements.size())) / num_windows;
      expected.busiest_column += most / (all / placed.num_columns) / num_windows;
    }
    const Spread found = spread_of(placed.inventory, placed.num_columns, placed.columns, window);
    EXPECT_NEAR(found.distinct_columns, expected.distinct_columns, 1e-9);
    EXPECT_NEAR(found.repeats, expected.repeats, 1e-9);
    EXPECT_NEAR(found.busiest_column, expected.busiest_column, 1e-9);
  }
}

TEST(Spread, ByHand) {
  const Inventory inventory = {
      {"a", {1, 2, 2}, 0}, {"b", {1, 2, 2}, 0}, {"c", {1, 2, 2}, 1}, {"d", {1, 4, 2}, 2}};
  // Windows {a b c} on columns 0 1 0 and {c d} on columns 0 0, of four columns.
  const Spread found = spread_of(inventory, 4, {Shard(0), Shard(1), Shard(0), Shard(0)}, 2);
  EXPECT_DOUBLE_EQ(found.distinct_columns, 1.5);
  EXPECT_DOUBLE_EQ(found.repeats, 1);
  EXPECT_DOUBLE_EQ(found.busiest_column, (8 / 3.0 + 4) / 2);
  EXPECT_EQ(spread_of({}, 4, {}, 2).distinct_columns, 0);
}

// However large, at the cost of the matrices: plans are read from files.
TEST(Spread, OfEnormousWindowsAndMeshesIsQuick) {
  Inventory inventory;
  PerParameter<Shard> columns;
  for (int w = 0; w < 3000; ++w) {
    inventory.push_back({std::to_string(w), {1, 1, 1}, w});
    columns.push_back(Shard(w * 300));
  }
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  EXPECT_EQ(spread_of(inventory, 1 << 20, columns, kMaxInt).distinct_columns, 3000);
  EXPECT_EQ(spread_of(inventory, 1 << 20, columns, 1500).distinct_columns, 1500);
}

TEST(Spread, OfNoMatricesIsNothing) {
  Spread nothing;
  nothing.column_bytes = {0, 0, 0, 0};
  EXPECT_EQ(spread({}, {2, 4}, {}, {}), nothing);
}

TEST(Spread, CountsTheWeightsOfEachColumn) {
  PlanOptions options;
  options.weight_bytes = 4;
  const Inventory inventory = {{"a", {1, 2, 3}, 0}, {"b", {1, 5, 7}, 0}, {"c", {1, 1, 11}, 1}};
  // Owners 0 and 2 of 2 x 2 slots are column 0.
  EXPECT_EQ(spread(inventory, {2, 2}, {Owner(0), Owner(1), Owner(2)}, options).column_bytes,
            (core::PerShard<std::int64_t>{4 * (6 + 11), 4 * 35}));
}

// Owners 0 and 2 of 2 x 2 slots are column 0, owners 0 and 1 node 0.
TEST(Spread, SaysWhatNodesAndColumnsHaveOfEachUnit) {
  PlanOptions options;
  options.weight_bytes = 2;
  Inventory inventory = {
      {"a", {1, 2, 3}, 7}, {"b", {1, 5, 1}, 4}, {"c", {1, 1, 4}, 7}, {"d", {1, 12, 1}, 7}};
  inventory[ParameterIndex(3)].column = Shard(1);
  const Spread found = spread(inventory, {2, 2}, {Owner(0), Owner(1), Owner(2), Owner(3)}, options);
  EXPECT_EQ(found.units, (std::vector<UnitSpread>{{7, 44, 32, 12, 20}, {4, 10, 10, 0, 10}}));
}

}  // namespace
}  // namespace dmuon::plan
