#include "dmuon/layout/packed_size.h"

#include <gtest/gtest.h>

namespace dmuon::layout {
namespace {

TEST(PackedSize, IsTheNextMultipleOf128) {
  EXPECT_EQ(packed_elements(0), 0);
  EXPECT_EQ(packed_elements(1), 128);
  EXPECT_EQ(packed_elements(128), 128);
  EXPECT_EQ(packed_elements(129), 256);
}

TEST(Inbox, TakesTheOwnSegmentOfEachPeer) {
  EXPECT_EQ(inbox_elements(25, 100, 4), 75);
  EXPECT_EQ(inbox_elements(0, 100, 4), 0);
  EXPECT_EQ(inbox_elements(100, 100, 1), 0);
}

// Three peers send 60 elements each into a room of 100: in two pieces of 30.
TEST(Inbox, IsNoLargerThanTheBuffer) {
  EXPECT_EQ(piece_elements(60, 100, 4), 30);
  EXPECT_EQ(inbox_elements(60, 100, 4), 90);
  EXPECT_EQ(piece_elements(7, 7, 4), 2);
}

// Fewer elements than peers: one at a time from each.
TEST(Inbox, HoldsOneElementOfEachPeerAtLeast) {
  EXPECT_EQ(piece_elements(2, 2, 9), 1);
  EXPECT_EQ(inbox_elements(2, 2, 9), 8);
}

}  // namespace
}  // namespace dmuon::layout
