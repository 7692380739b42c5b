#include "dmuon/plan/layout.h"

#include <gtest/gtest.h>

#include <set>

namespace dmuon::plan {
namespace {

// Every mesh of up to 9 x 9, so powers of two and others, odd and even numbers of shards.
class Layout : public testing::TestWithParam<Mesh> {};

std::vector<Mesh> meshes() {
  std::vector<Mesh> all;
  for (int replicates = 1; replicates <= 9; ++replicates) {
    for (int shards = 1; shards <= 9; ++shards) all.push_back({replicates, shards});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(AllSmallMeshes, Layout, testing::ValuesIn(meshes()),
                         [](const auto& mesh_info) {
                           return core::message(mesh_info.param.num_replicates, "x",
                                                mesh_info.param.num_shards);
                         });

TEST_P(Layout, PutsAnyGConsecutiveMatricesOnGColumns) {
  const Mesh mesh = GetParam();
  for (int first = 0; first < 2 * mesh.num_slots(); ++first) {
    std::set<int> columns;
    for (int w = first; w < first + mesh.num_shards; ++w) {
      columns.insert(layout_slot(w, mesh).shard);
    }
    ASSERT_EQ(columns.size(), static_cast<std::size_t>(mesh.num_shards)) << "from " << first;
  }
}

TEST_P(Layout, UsesEverySlotOnceInAnyRTimesGConsecutiveMatrices) {
  const Mesh mesh = GetParam();
  for (int first = 0; first < 2 * mesh.num_slots(); ++first) {
    std::set<int> slots;
    for (int w = first; w < first + mesh.num_slots(); ++w) {
      const Slot slot = layout_slot(w, mesh);
      ASSERT_TRUE(slot.replicate >= 0 && slot.replicate < mesh.num_replicates);
      ASSERT_TRUE(slot.shard >= 0 && slot.shard < mesh.num_shards);
      slots.insert(slot_index(slot, mesh));
    }
    ASSERT_EQ(slots.size(), static_cast<std::size_t>(mesh.num_slots())) << "from " << first;
  }
}

TEST(LayoutSlot, IsThePapersXorRuleOnItsFourByEightMesh) {
  for (std::int64_t w = 0; w < 100; ++w) {
    const Slot expected{static_cast<int>((w % 4) ^ ((w / 8) % 4)), static_cast<int>(w % 8)};
    EXPECT_EQ(layout_slot(w, {4, 8}), expected) << "w = " << w;
  }
}

TEST(LayoutSlot, TakesIndicesPast32Bits) {
  const std::int64_t period = 12 * (std::int64_t{1} << 40);
  EXPECT_EQ(layout_slot(period + 7, {3, 4}), layout_slot(7, {3, 4}));
}

TEST(LayoutSlot, RejectsANegativeIndexAndAnEmptyMesh) {
  EXPECT_THROW(layout_slot(-1, {1, 1}), core::InvalidArgument);
  EXPECT_THROW(layout_slot(0, {0, 1}), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::plan
