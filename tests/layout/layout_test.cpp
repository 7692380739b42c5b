#include "dmuon/layout/layout.h"

#include <gtest/gtest.h>

namespace dmuon::layout {
namespace {

using core::ParameterIndex;
using core::Shard;
using core::Slot;
using core::UnitIndex;
using Elements = core::Vector<Slot, std::int64_t>;

UnitLayout layout_of(const Parameters& parameters, Mesh mesh) {
  return unit_layout(pack(parameters, leaves_of(parameters), UnitIndex(0), mesh, /*pads=*/false));
}

// Each leaf ends with a gap to the next multiple of 128, which its last parameter's owner sends:
// 15 elements of a leaf of 25, then the other 10 with the 103 of the gap.
TEST(UnitLayout, CountsAGapAfterEachLeaf) {
  EXPECT_EQ(layout_of({{{"a", {1, 10, 13}, 0}, Slot(0)},
                       {{"b", {1, 3, 5}, 0}, Slot(1)},
                       {{"c", {1, 2, 5}, 0, false, true}, Slot(2)}},
                      {1, 3})
                .owner_elements,
            (Elements{256, 15, 113}));
}

// By hand: each column's part of 32 ends with the gap to the next leaf, at 128.
TEST(UnitLayout, CountsAGapAfterEachColumnOfALeaf) {
  const UnitLayout unit = layout_of({{{"a", {2, 4, 4}, 0, false, false, Shard(0)}, Slot(0)},
                                     {{"b", {1, 4, 4}, 0, false, true, Shard(1)}, Slot(1)},
                                     {{"c", {1, 4, 4}, 0, false, true, Shard(1)}, Slot(3)},
                                     {{"d", {1, 3, 3}, 0}, Slot(2)}},
                                    {2, 2});
  EXPECT_EQ(unit.owner_elements, (Elements{128, 16, 128, 112}));
  EXPECT_EQ(unit.kept_elements, 128);
}

TEST(Layout, AddsUpWhatColumnsHave) {
  const Layout layout{{2, 2}, {{"a", {1, 2, 3, 4}, 2, 4, false, 2}, {"b", {5, 0, 0, 0}, 2, 4}}};
  EXPECT_EQ(layout.column_elements(layout.units.front(), Shard(0)), 4);
  EXPECT_EQ(layout.column_elements(layout.units.front(), Shard(1)), 6);
  EXPECT_EQ(layout.buffer_elements(layout.units.front()), 10 - 2);
  EXPECT_EQ(layout.largest_weights(), 2 * 8);
  EXPECT_EQ(layout.largest_gradients(), 4 * 8);
  EXPECT_EQ(layout.node_mean(layout.units.front(), Shard(0)), 4 * 4);
  EXPECT_EQ(layout.node_mean(layout.units.front(), Shard(1)), 4 * 6);
}

}  // namespace
}  // namespace dmuon::layout
