#include "dmuon/layout/mesh.h"

#include <gtest/gtest.h>

#include <vector>

namespace dmuon::layout {
namespace {

using core::Owner;
using core::Replicate;
using core::Shard;
using core::Slot;

TEST(Mesh, NumbersItsOwnersRowByRowAndSlotBySlot) {
  const Mesh mesh{2, 3, 2};
  EXPECT_EQ(mesh.num_slots(), 6);
  EXPECT_EQ(mesh.num_owners(), 12);
  int number = 0;
  for (const Replicate replicate : mesh.replicates()) {
    for (const Shard shard : mesh.shards()) {
      for (int rank = 0; rank < 2; ++rank, ++number) {
        const Owner owner(number);
        EXPECT_EQ(mesh.owner_at(replicate, shard, rank), owner);
        EXPECT_EQ(mesh.slot_of(owner), Slot(number / 2));
        EXPECT_EQ(mesh.replicate_of(owner), replicate);
        EXPECT_EQ(mesh.shard_of(owner), shard);
      }
    }
  }
  EXPECT_EQ(number, 12);
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

// On 2 x 3, by hand: slot 4 is in row 1 (slots 3, 4, 5) and in column 1 (slots 1, 4).
TEST(Mesh, NumbersTheMembersOfRowsAndColumns) {
  const Mesh mesh{2, 3};
  const auto slots_along = [&](Axis axis) {
    std::vector<int> slots;
    for (int member = 0; member < mesh.size(axis); ++member)
      slots.push_back(mesh.slot_of(Slot(4), axis, member).value());
    return slots;
  };
  EXPECT_EQ(slots_along(Axis::kRow), (std::vector<int>{3, 4, 5}));
  EXPECT_EQ(slots_along(Axis::kColumn), (std::vector<int>{1, 4}));
  EXPECT_EQ(mesh.member_of(Slot(4), Axis::kRow), 1);
  EXPECT_EQ(mesh.member_of(Slot(4), Axis::kColumn), 1);
  EXPECT_EQ(mesh.member_of(Slot(2), Axis::kRow), 2);
  EXPECT_EQ(mesh.member_of(Slot(2), Axis::kColumn), 0);
}

}  // namespace
}  // namespace dmuon::layout
