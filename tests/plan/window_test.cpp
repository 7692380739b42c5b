#include "dmuon/plan/window.h"

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
  Options options;
  options.lookahead = window;
  return spread(inventory, mesh, owner, options);
}

Windows windows_of(const Placed& placed, int window) {
  Windows windows(placed.inventory, placed.num_columns, window);
  for (const ParameterIndex w : placed.columns.indices()) windows.add(w, placed.columns[w], 1);
  return windows;
}

// Matrices of units [first, last] on a column.
int count(const Placed& placed, int first, int last, Shard column) {
  int sum = 0;
  for (const ParameterIndex w : placed.columns.indices()) {
    sum += placed.places[w] >= first && placed.places[w] <= last && placed.columns[w] == column;
  }
  return sum;
}

// The sum of squares that change_of_swap is about: windows that hold a unit at all, and every unit
// as often as there are windows with it.
std::int64_t squares(const Placed& placed, int window) {
  std::int64_t sum = 0;
  for (const Shard column : core::Indices<Shard>(placed.num_columns)) {
    for (int first = 1 - window; first < placed.num_units; ++first) {
      const std::int64_t in_window = count(placed, first, first + window - 1, column);
      const std::int64_t in_unit = count(placed, first, first, column);
      sum += in_window * in_window + window * in_unit * in_unit;
    }
  }
  return sum;
}

TEST(Spread, AreWhatARecountFromTheDefinitionGives) {
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
        const auto size = static_cast<double>(placed.inventory[w].rows * placed.inventory[w].cols);
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
  const Inventory inventory = {{"a", 2, 2, 0}, {"b", 2, 2, 0}, {"c", 2, 2, 1}, {"d", 4, 2, 2}};
  // Windows {a b c} on columns 0 1 0 and {c d} on columns 0 0, of four columns.
  const Spread found = spread_of(inventory, 4, {Shard(0), Shard(1), Shard(0), Shard(0)}, 2);
  EXPECT_DOUBLE_EQ(found.distinct_columns, 1.5);
  EXPECT_DOUBLE_EQ(found.repeats, 1);
  EXPECT_DOUBLE_EQ(found.busiest_column, (8 / 3.0 + 4) / 2);
  EXPECT_EQ(spread_of({}, 4, {}, 2).distinct_columns, 0);
}

// However large, at the cost of the matrices: plans are read from files.
TEST(Spread, OfEnormousWindowsAndMeshesAreQuick) {
  Inventory inventory;
  PerParameter<Shard> columns;
  for (int w = 0; w < 3000; ++w) {
    inventory.push_back({std::to_string(w), 1, 1, w});
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
  Options options;
  options.weight_bytes = 4;
  const Inventory inventory = {{"a", 2, 3, 0}, {"b", 5, 7, 0}, {"c", 1, 11, 1}};
  // Owners 0 and 2 of 2 x 2 slots are column 0.
  EXPECT_EQ(spread(inventory, {2, 2}, {Owner(0), Owner(1), Owner(2)}, options).column_bytes,
            (core::PerShard<std::int64_t>{4 * (6 + 11), 4 * 35}));
}

TEST(Windows, CountWhatUnitsAndTheWindowThatEndsThereHoldOnAColumn) {
  balance::Random random(2);
  for (int trial = 0; trial < 100; ++trial) {
    const Placed placed = draw_placed(random);
    const int window = draw(random, 1, 6);
    const Windows windows = windows_of(placed, window);
    for (const ParameterIndex w : placed.columns.indices()) {
      const int unit = placed.places[w];
      for (const Shard column : core::Indices<Shard>(placed.num_columns)) {
        EXPECT_EQ(windows.in_unit(w, column), count(placed, unit, unit, column));
        EXPECT_EQ(windows.in_window(w, column), count(placed, unit - window + 1, unit, column));
        bool repeats = false;
        for (int first = unit - window + 1; first <= unit; ++first) {
          repeats = repeats || count(placed, first, first + window - 1, column) > 1;
        }
        EXPECT_EQ(windows.repeats(w, column), repeats);
      }
    }
  }
}

TEST(Windows, ForetellWhatASwapDoesToTheSumOfSquares) {
  balance::Random random(3);
  for (int trial = 0; trial < 200; ++trial) {
    Placed placed = draw_placed(random);
    const int window = std::min(draw(random, 1, 6), placed.num_units);
    Windows windows = windows_of(placed, window);
    const ParameterIndex a(draw(random, 0, placed.columns.size() - 1));
    const ParameterIndex b(draw(random, 0, placed.columns.size() - 1));
    if (placed.columns[a] == placed.columns[b]) continue;
    const std::int64_t before = squares(placed, window);
    const std::int64_t change = windows.change_of_swap(a, placed.columns[a], b, placed.columns[b]);
    // Twice, since foretelling changes nothing.
    EXPECT_EQ(windows.change_of_swap(a, placed.columns[a], b, placed.columns[b]), change);
    windows.swap(a, placed.columns[a], b, placed.columns[b]);
    std::swap(placed.columns[a], placed.columns[b]);
    EXPECT_EQ(squares(placed, window) - before, change);
    for (const ParameterIndex w : placed.columns.indices()) {
      const int unit = placed.places[w];
      EXPECT_EQ(windows.in_unit(w, placed.columns[w]),
                count(placed, unit, unit, placed.columns[w]));
    }
  }
}

}  // namespace
}  // namespace dmuon::plan
