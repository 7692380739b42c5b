#include "dmuon/plan/mesh.h"

#include <gtest/gtest.h>

namespace dmuon::plan {
namespace {

TEST(Mesh, NumbersItsSlotsRowByRow) {
  const Mesh mesh{3, 4};
  EXPECT_EQ(mesh.num_slots(), 12);
  int index = 0;
  for (int replicate = 0; replicate < 3; ++replicate) {
    for (int shard = 0; shard < 4; ++shard, ++index) {
      EXPECT_EQ(slot_index({replicate, shard}, mesh), index);
      EXPECT_EQ(slot_at(index, mesh), (Slot{replicate, shard}));
    }
  }
}

TEST(Mesh, NumbersItsOwnersSlotBySlot) {
  const Mesh mesh{2, 3, 2};
  EXPECT_EQ(mesh.num_slots(), 6);
  EXPECT_EQ(mesh.num_owners(), 12);
  for (int owner = 0; owner < 12; ++owner) {
    EXPECT_EQ(mesh.slot_of(owner), owner / 2);
    EXPECT_EQ(mesh.replicate_of(owner), owner / 6);
    EXPECT_EQ(mesh.shard_of(owner), owner / 2 - 3 * (owner / 6));
  }
}

TEST(Mesh, WithAnEmptySideOrTooManyRanksIsRejected) {
  EXPECT_NO_THROW(validate(Mesh{1, 1}));
  EXPECT_NO_THROW(validate(Mesh{1 << 10, 1 << 10}));
  EXPECT_NO_THROW(validate(Mesh{1 << 10, 1 << 9, 2}));
  EXPECT_THROW(validate(Mesh{0, 4}), core::InvalidArgument);
  EXPECT_THROW(validate(Mesh{4, -1}), core::InvalidArgument);
  EXPECT_THROW(validate(Mesh{4, 1, 0}), core::InvalidArgument);
  EXPECT_THROW(validate(Mesh{1 << 16, 1 << 16}), core::InvalidArgument);  // 2^32 wraps to 0
  EXPECT_THROW(validate(Mesh{1 << 10, 1 << 10, 2}), core::InvalidArgument);
  EXPECT_THROW(validate(Mesh{1 << 2, 1 << 2, 1 << 30}), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::plan
