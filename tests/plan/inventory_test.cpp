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
  EXPECT_NO_THROW(validate(Inventory{{"a", 1, 1, 0}, {"b", 1, (std::int64_t{1} << 31) - 1, 3}}));
  const Inventory bad[] = {
      {{"ok", 1, 1, 0}, {"layer.w", 0, 4, 0}},
      {{"layer.w", 4, -1, 0}},
      {{"layer.w", std::int64_t{1} << 31, 1, 0}},
      {{"layer.w", 4, 4, -1}},
      {{"layer.w", (std::int64_t{1} << 31) - 1, (std::int64_t{1} << 31) - 1, 0}},
      {{"ok", 1 << 28, 1 << 28, 0}, {"layer.w", 1, 1, 0}},
      {{"layer.w", 4, 4, 0}, {"layer.w", 4, 4, 0}},
      {{"layer.w", 4, 4, 0, false, 0}},
      {{"layer.w", 4, 4, 0, false, std::int64_t{1} << 31}},
      {{"layer.w", 1 << 28, 1 << 28, 0, false, 2}},
      {{"layer.w", 4, 6, 0, false, 1, false, {}, 0}},
      {{"layer.w", 4, 6, 0, false, 1, false, {}, 4}},
      {{"layer.w", (std::int64_t{1} << 31) - 1, (std::int64_t{1} << 31) - 1, 0, false,
        (std::int64_t{1} << 31) - 1}},
      // Columns: not from 0 on, one left out, of some parameters only, of unequal parts.
      {{"layer.w", 4, 4, 0, false, 1, false, Shard(1)}},
      {{"a", 4, 4, 0, false, 1, false, Shard(0)}, {"layer.w", 4, 4, 0, false, 1, true, Shard(2)}},
      {{"a", 4, 4, 0, false, 1, false, Shard(0)}, {"layer.w", 4, 4, 0, false, 1, true}},
      {{"a", 4, 4, 0, false, 1, false, Shard(0)}, {"layer.w", 4, 3, 0, false, 1, true, Shard(1)}},
      {{"a", 4, 4, 0, false, 1, false, Shard(0)},
       {"layer.w", 4, 3, 0, false, 1, true, Shard(1)},
       {"b", 4, 4, 0}},
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
  const Inventory stack{{"a", 4, 4, 0, false, 2, false, Shard(0)},
                        {"b", 4, 4, 0, false, 1, true, Shard(1)},
                        {"c", 4, 4, 0, false, 1, true, Shard(1)},
                        {"d", 3, 3, 0}};
  EXPECT_NO_THROW(validate(stack));
  // By hand: each column's part of 32 ends with the gap to the next leaf, at 128.
  EXPECT_EQ(packed_elements_of(stack), (PerParameter<std::int64_t>{128, 16, 112, 128}));
}

TEST(GroupByShape, TellsRowsFromColumnsAndOrdersByFirstAppearance) {
  const ShapeGroups groups =
      group_by_shape({{"a", 4, 8, 0}, {"b", 8, 4, 0}, {"c", 4, 8, 1}, {"d", 2, 2, 1}});
  EXPECT_EQ(groups.shapes, (PerShape<Shape>{{4, 8}, {8, 4}, {2, 2}}));
  EXPECT_EQ(groups.num_matrices, (PerShape<int>{2, 1, 1}));
  EXPECT_EQ(groups.shape_of, shapes({0, 1, 0, 2}));
}

TEST(GroupByShape, KeepsMatricesOverTensorParallelRanksApart) {
  const ShapeGroups groups =
      group_by_shape({{"a", 4, 8, 0}, {"b", 4, 8, 0, true}, {"c", 4, 8, 1, true}});
  EXPECT_EQ(groups.shapes, (PerShape<Shape>{{4, 8, false}, {4, 8, true}}));
  EXPECT_EQ(groups.num_matrices, (PerShape<int>{1, 2}));
  EXPECT_EQ(groups.shape_of, shapes({0, 1, 1}));
  EXPECT_EQ(to_string(groups.shapes.front()), "4 x 8");
  EXPECT_EQ(to_string(groups.shapes.back()), "4 x 8 over TP");
}

// A stack that is not divided goes to one owner whole, which a single matrix of its rows and
// columns does not.
TEST(GroupByShape, KeepsStacksApartByTheirNumberOfMatrices) {
  const ShapeGroups groups = group_by_shape({{"a", 4, 8, 0},
                                             {"b", 4, 8, 0, false, 3},
                                             {"c", 4, 8, 1, false, 3},
                                             {"d", 4, 8, 1, true, 3}});
  EXPECT_EQ(groups.num_matrices, (PerShape<int>{1, 2, 1}));
  EXPECT_EQ(groups.shape_of, shapes({0, 1, 1, 2}));
  EXPECT_EQ(groups.shapes[ShapeIndex(1)].num_elements(), 96);
  EXPECT_EQ(to_string(groups.shapes[ShapeIndex(1)]), "3 of 4 x 8");
  EXPECT_EQ(to_string(groups.shapes.back()), "3 of 4 x 8 over TP");
}

// Of one shape and one layout are a and f, and no others.
TEST(GroupByShape, KeepsLayoutsApartThatWouldBeUpdatedOtherwise) {
  const ShapeGroups groups = group_by_shape({{"a", 4, 6, 0, false, 1, false, {}, 3, true},
                                             {"b", 4, 6, 0, false, 1, false, {}, 3},
                                             {"c", 4, 2, 0, false, 3},
                                             {"d", 4, 2, 0, false, 3, false, {}, 1, true},
                                             {"e", 4, 6, 0, false, 5, false, {}, 3},
                                             {"f", 4, 6, 0, false, 1, false, {}, 3, true}});
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

// 15 elements of a leaf of 25, then the other 10 with the 103 of the gap after it.
TEST(PackedElementsOf, CountAGapAfterEachLeaf) {
  EXPECT_EQ(packed_elements_of({{"a", 10, 13, 0}, {"b", 3, 5, 0}, {"c", 2, 5, 0, false, 1, true}}),
            (PerParameter<std::int64_t>{256, 15, 113}));
  EXPECT_EQ(packed_elements_of({{"a", 3, 5, 0}}), PerParameter<std::int64_t>{128});
}

TEST(Validate, WantsWhatContinuesAnotherToFollowOneOfItsUnit) {
  validate({{"a", 2, 3, 0}, {"b", 2, 3, 0, false, 1, true}});
  EXPECT_EQ(message_of([] {
              validate({{"b", 2, 3, 0, false, 1, true}});
            }),
            "Inventory: matrix 'b' must follow a matrix of its unit, which it continues; got none "
            "before it");
  EXPECT_EQ(
      message_of([] {
        validate({{"a", 2, 3, 1}, {"b", 2, 3, 0, false, 1, true}});
      }),
      "Inventory: matrix 'b' must follow a matrix of its unit, which it continues; got one of "
      "another unit");
}

TEST(GroupByUnit, OrdersUnitsByTheirFirstMatricesEvenIfTheyInterleave) {
  const auto units = group_by_unit({{"a", 2, 3, 7}, {"b", 1, 1, 0}, {"c", 4, 5, 7}});
  ASSERT_EQ(units.size(), 2);
  EXPECT_EQ(units.front(), (std::vector{ParameterIndex(0), ParameterIndex(2)}));
  EXPECT_EQ(units.back(), std::vector{ParameterIndex(1)});
  EXPECT_TRUE(group_by_unit({}).empty());
}

}  // namespace
}  // namespace dmuon::plan
