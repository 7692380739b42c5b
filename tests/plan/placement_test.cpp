#include "dmuon/plan/placement.h"

#include <gtest/gtest.h>

#include <set>

#include "dmuon/core/error.h"
#include "dmuon/plan/layout.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

TEST(Place, FollowsTheLayoutWhereTheCountsAllowIt) {
  for (const Mesh mesh : {Mesh{4, 8}, Mesh{3, 4}, Mesh{1, 5}, Mesh{5, 1}}) {
    const Inventory inventory = oracle::inventory(std::vector<int>(2 * mesh.num_slots(), 0));
    Counts counts(1, mesh.num_slots());
    for (int t = 0; t < mesh.num_slots(); ++t) counts.at(0, t) = 2;
    const std::vector<int> owner = place(inventory, group_by_shape(inventory), counts, mesh);
    for (std::size_t w = 0; w < owner.size(); ++w) {
      EXPECT_EQ(slot_at(owner[w], mesh), layout_slot(static_cast<std::int64_t>(w), mesh));
    }
  }
}

TEST(Place, GivesEverySlotExactlyItsCounts) {
  const Mesh mesh{2, 3};
  const std::vector<int> shape_of = {0, 1, 1, 0, 2, 1, 0, 1};
  const Inventory inventory = oracle::inventory(shape_of);
  const int expected[3][6] = {{2, 0, 0, 1, 0, 0}, {0, 3, 0, 0, 0, 1}, {0, 0, 0, 0, 1, 0}};
  Counts counts(3, 6);
  for (int s = 0; s < 3; ++s) {
    for (int t = 0; t < 6; ++t) counts.at(s, t) = expected[s][t];
  }
  const std::vector<int> owner = place(inventory, group_by_shape(inventory), counts, mesh);
  int got[3][6] = {};
  for (std::size_t w = 0; w < owner.size(); ++w) ++got[shape_of[w]][owner[w]];
  for (int s = 0; s < 3; ++s) {
    for (int t = 0; t < 6; ++t) EXPECT_EQ(got[s][t], expected[s][t]) << s << ", " << t;
  }
}

TEST(Place, SpreadsTheMatricesOfAUnitOverColumnsEvenIfTheUnitIsNotContiguous) {
  // Two units of 4, interleaved: by the layout alone each would use 2 of 4 columns.
  const Mesh mesh{2, 4};
  Inventory inventory;
  for (int w = 0; w < 8; ++w) inventory.push_back({core::message("m", w), 4, 4, w % 2});
  Counts counts(1, 8);
  for (int t = 0; t < 8; ++t) counts.at(0, t) = 1;
  const std::vector<int> owner = place(inventory, group_by_shape(inventory), counts, mesh);
  for (int unit = 0; unit < 2; ++unit) {
    std::set<int> columns;
    for (int w = unit; w < 8; w += 2) columns.insert(slot_at(owner[w], mesh).shard);
    EXPECT_EQ(columns.size(), 4U) << "unit " << unit;
  }
}

TEST(Place, SaysSoWhenTheCountsDoNotFit) {
  const Inventory inventory = oracle::inventory({0, 0});
  EXPECT_THROW(place(inventory, group_by_shape(inventory), Counts(1, 1), {1, 1}),
               core::InternalError);
}

}  // namespace
}  // namespace dmuon::plan
