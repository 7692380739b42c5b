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

TEST(Mesh, WithAnEmptySideOrTooManySlotsIsRejected) {
  EXPECT_NO_THROW(validate(Mesh{1, 1}));
  EXPECT_NO_THROW(validate(Mesh{1 << 10, 1 << 10}));
  EXPECT_THROW(validate(Mesh{0, 4}), core::InvalidArgument);
  EXPECT_THROW(validate(Mesh{4, -1}), core::InvalidArgument);
  EXPECT_THROW(validate(Mesh{1 << 16, 1 << 16}), core::InvalidArgument);  // 2^32 wraps to 0
}

}  // namespace
}  // namespace dmuon::plan
