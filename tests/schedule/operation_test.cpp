#include "dmuon/schedule/operation.h"

#include <gtest/gtest.h>

namespace dmuon::schedule {
namespace {

TEST(MessagesOf, LeavesOutEmptyPartsAndGroupsOfOne) {
  using layout::Axis;
  // Rows (1, 0, 3) and (5, 0, 0).
  const Layout layout{{2, 3}, {{"a", {1, 0, 3, 5, 0, 0}, 2, 4}}};
  const auto messages = [&](Kind kind, int slot) {
    return messages_of({.kind = kind}, layout, core::Slot(slot));
  };
  using Messages = std::vector<Message>;
  for (int slot = 0; slot < 6; ++slot) {
    EXPECT_EQ(messages(Kind::kPublishIntra, slot),
              (Messages{{Axis::kRow, 0, 12}, {Axis::kRow, 2, 6}}));
    EXPECT_EQ(messages(Kind::kRouteIntra, slot),
              (Messages{{Axis::kRow, 0, 24}, {Axis::kRow, 2, 12}}));
  }
  EXPECT_EQ(messages(Kind::kPublishInter, 3),
            (Messages{{Axis::kColumn, 0, 2}, {Axis::kColumn, 1, 10}}));
  EXPECT_EQ(messages(Kind::kRouteInter, 2), (Messages{{Axis::kColumn, 0, 12}}));
  EXPECT_EQ(messages(Kind::kPublishInter, 1), Messages{});
  EXPECT_EQ(messages(Kind::kReshard, 0), Messages{});
  const Layout column{{2, 1}, {{"a", {1, 1}, 2, 4}}};
  EXPECT_EQ(messages_of({.kind = Kind::kPublishIntra}, column, core::Slot(0)), Messages{});
  const Layout row{{1, 2}, {{"a", {1, 1}, 2, 4}}};
  EXPECT_EQ(messages_of({.kind = Kind::kPublishInter}, row, core::Slot(0)), Messages{});
}

TEST(MessagesOf, SendsBetweenNodesAloneWhatOtherColumnsDoNotHave) {
  using layout::Axis;
  using Messages = std::vector<Message>;
  // Column 0 has 1 + 3 elements, column 1 2 + 4, and of each 2 are its own.
  const Layout layout{{2, 2}, {{"a", {1, 2, 3, 4}, 2, 4, false, 2}}};
  EXPECT_EQ(messages_of({.kind = Kind::kPublishIntra}, layout, core::Slot(0)),
            (Messages{{Axis::kRow, 0, 4}, {Axis::kRow, 1, 8}}));
  EXPECT_EQ(messages_of({.kind = Kind::kPublishInter}, layout, core::Slot(2)),
            (Messages{{Axis::kColumn, 0, 2}, {Axis::kColumn, 1, 6}}));
  EXPECT_EQ(layout.largest_weights(), 2 * (10 - 2));
}

}  // namespace
}  // namespace dmuon::schedule
