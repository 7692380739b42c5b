#include "dmuon/plan/inventory.h"

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "tests/plan/message_of.h"

namespace dmuon::plan {
namespace {

using core::Shard;

PerParameter<ShapeIndex> shapes(const std::vector<int>& numbers) {
  PerParameter<ShapeIndex> all;
  for (const int number : numbers) all.emplace_back(number);
  return all;
}

TEST(Inventory, WithBadSidesUnitsOrRepeatedNamesIsRejectedByName) {
  EXPECT_NO_THROW(validate(Inventory{}));
  EXPECT_NO_THROW(validate(Inventory{{"a", {1, 12, 4, 1, false, {2, 1}}, 0}}));
  EXPECT_NO_THROW(
      validate(Inventory{{"a", {1, 1, 1}, 0}, {"b", {1, 1, (std::int64_t{1} << 31) - 1}, 3}}));
  const Inventory bad[] = {
      {{"ok", {1, 1, 1}, 0}, {"layer.w", {1, 0, 4}, 0}},
      {{"layer.w", {1, 4, -1}, 0}},
      {{"layer.w", {1, std::int64_t{1} << 31, 1}, 0}},
      {{"layer.w", {1, 4, 4}, -1}},
      {{"layer.w", {1, (std::int64_t{1} << 31) - 1, (std::int64_t{1} << 31) - 1}, 0}},
      {{"ok", {1, 1 << 28, 1 << 28}, 0}, {"layer.w", {1, 1, 1}, 0}},
      {{"layer.w", {1, 4, 4}, 0}, {"layer.w", {1, 4, 4}, 0}},
      {{"layer.w", {0, 4, 4}, 0}},
      {{"layer.w", {std::int64_t{1} << 31, 4, 4}, 0}},
      {{"layer.w", {2, 1 << 28, 1 << 28}, 0}},
      {{"layer.w", {1, 4, 6, 0}, 0}},
      {{"layer.w", {1, 4, 6, 4}, 0}},
      {{"layer.w",
        {(std::int64_t{1} << 31) - 1, (std::int64_t{1} << 31) - 1, (std::int64_t{1} << 31) - 1},
        0}},
      // Heights: one, of nothing, more than the rows, no divisor, beside what excludes them.
      {{"layer.w", {1, 12, 4, 1, false, {12}}, 0}},
      {{"layer.w", {1, 12, 4, 1, false, {3, 0}}, 0}},
      {{"layer.w", {1, 12, 4, 1, false, {16, 8}}, 0}},
      {{"layer.w", {1, 12, 4, 1, false, {5, 2}}, 0}},
      {{"layer.w", {1, 12, 4, 2, false, {2, 1}}, 0}},
      {{"layer.w", {1, 12, 4, 1, true, {2, 1}}, 0}},
      {{"layer.w", {1, 12, 4, 1, false, {2, 1}}, 0, true}},
      // Columns: not from 0 on, one left out, of some parameters only, of unequal parts.
      {{"layer.w", {1, 4, 4}, 0, false, false, Shard(1)}},
      {{"a", {1, 4, 4}, 0, false, false, Shard(0)},
       {"layer.w", {1, 4, 4}, 0, false, true, Shard(2)}},
      {{"a", {1, 4, 4}, 0, false, false, Shard(0)}, {"layer.w", {1, 4, 4}, 0, false, true}},
      {{"a", {1, 4, 4}, 0, false, false, Shard(0)},
       {"layer.w", {1, 4, 3}, 0, false, true, Shard(1)}},
      {{"a", {1, 4, 4}, 0, false, false, Shard(0)},
       {"layer.w", {1, 4, 3}, 0, false, true, Shard(1)},
       {"b", {1, 4, 4}, 0}},
  };
  for (const Inventory& inventory : bad) {
    try {
      validate(inventory);
      ADD_FAILURE() << "did not throw";
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("layer.w"), std::string::npos) << error.what();
    }
  }
}

TEST(Inventory, MayHaveLeavesInEqualPartsOfAllColumns) {
  const Inventory stack{{"a", {2, 4, 4}, 0, false, false, Shard(0)},
                        {"b", {1, 4, 4}, 0, false, true, Shard(1)},
                        {"c", {1, 4, 4}, 0, false, true, Shard(1)},
                        {"d", {1, 3, 3}, 0}};
  EXPECT_NO_THROW(validate(stack));
}

TEST(GroupByShape, TellsRowsFromColumnsAndOrdersByFirstAppearance) {
  const ShapeGroups groups = group_by_shape(
      {{"a", {1, 4, 8}, 0}, {"b", {1, 8, 4}, 0}, {"c", {1, 4, 8}, 1}, {"d", {1, 2, 2}, 1}});
  EXPECT_EQ(groups.shapes, (PerShape<Shape>{{4, 8}, {8, 4}, {2, 2}}));
  EXPECT_EQ(groups.num_matrices, (PerShape<int>{2, 1, 1}));
  EXPECT_EQ(groups.shape_of, shapes({0, 1, 0, 2}));
}

TEST(GroupByShape, KeepsMatricesOverTensorParallelRanksApart) {
  const ShapeGroups groups =
      group_by_shape({{"a", {1, 4, 8}, 0}, {"b", {1, 4, 8}, 0, true}, {"c", {1, 4, 8}, 1, true}});
  EXPECT_EQ(groups.shapes, (PerShape<Shape>{{4, 8, false}, {4, 8, true}}));
  EXPECT_EQ(groups.num_matrices, (PerShape<int>{1, 2}));
  EXPECT_EQ(groups.shape_of, shapes({0, 1, 1}));
  EXPECT_EQ(to_string(groups.shapes.front()), "4 x 8");
  EXPECT_EQ(to_string(groups.shapes.back()), "4 x 8 over TP");
}

// A stack that is not divided goes to one owner whole, which a single matrix of its rows and
// columns does not.
TEST(GroupByShape, KeepsStacksApartByTheirNumberOfMatrices) {
  const ShapeGroups groups = group_by_shape(
      {{"a", {1, 4, 8}, 0}, {"b", {3, 4, 8}, 0}, {"c", {3, 4, 8}, 1}, {"d", {3, 4, 8}, 1, true}});
  EXPECT_EQ(groups.num_matrices, (PerShape<int>{1, 2, 1}));
  EXPECT_EQ(groups.shape_of, shapes({0, 1, 1, 2}));
  EXPECT_EQ(groups.shapes[ShapeIndex(1)].num_elements(), 96);
  EXPECT_EQ(to_string(groups.shapes[ShapeIndex(1)]), "3 of 4 x 8");
  EXPECT_EQ(to_string(groups.shapes.back()), "3 of 4 x 8 over TP");
}

// Of one shape and one layout are a and f, and no others.
TEST(GroupByShape, KeepsLayoutsApartThatWouldBeUpdatedOtherwise) {
  const ShapeGroups groups = group_by_shape({{"a", {1, 4, 6, 3, true}, 0},
                                             {"b", {1, 4, 6, 3}, 0},
                                             {"c", {3, 4, 2}, 0},
                                             {"d", {3, 4, 2, 1, true}, 0},
                                             {"e", {5, 4, 6, 3}, 0},
                                             {"f", {1, 4, 6, 3, true}, 0}});
  EXPECT_EQ(groups.shape_of, shapes({0, 1, 2, 3, 4, 0}));
  const auto words = [&](int index) { return to_string(groups.shapes[ShapeIndex(index)]); };
  EXPECT_EQ(words(0), "4 x 3*2 transposed");
  EXPECT_EQ(words(1), "4 x 3*2");
  EXPECT_EQ(words(2), "3 of 4 x 2");
  EXPECT_EQ(words(3), "3 of 4 x 2 transposed");
  EXPECT_EQ(words(4), "5 of 4 x 3*2");
  for (const ShapeIndex s : groups.shapes.indices()) {
    EXPECT_EQ(groups.shapes[s].rows, 4);
    EXPECT_EQ(groups.shapes[s].cols, 2);
    EXPECT_EQ(groups.shapes[s].num_elements(), s.value() == 4 ? 120 : 24);
  }
}

TEST(Validate, WantsWhatContinuesAnotherToFollowOneOfItsUnit) {
  validate({{"a", {1, 2, 3}, 0}, {"b", {1, 2, 3}, 0, false, true}});
  EXPECT_EQ(
      message_of([] {
        validate({{"b", {1, 2, 3}, 0, false, true}});
      }),
      "Inventory: parameter 'b' must follow a parameter of its unit, which it continues; got none "
      "before it");
  EXPECT_EQ(message_of([] {
              validate({{"a", {1, 2, 3}, 1}, {"b", {1, 2, 3}, 0, false, true}});
            }),
            "Inventory: parameter 'b' must follow a parameter of its unit, which it continues; got "
            "one of "
            "another unit");
}

TEST(GroupByUnit, OrdersUnitsByTheirFirstMatricesEvenIfTheyInterleave) {
  const auto units = group_by_unit({{"a", {1, 2, 3}, 7}, {"b", {1, 1, 1}, 0}, {"c", {1, 4, 5}, 7}});
  ASSERT_EQ(units.size(), 2);
  EXPECT_EQ(units.front(), (std::vector{ParameterIndex(0), ParameterIndex(2)}));
  EXPECT_EQ(units.back(), std::vector{ParameterIndex(1)});
  EXPECT_TRUE(group_by_unit({}).empty());
}

}  // namespace
}  // namespace dmuon::plan
