#include "dmuon/core/idle_blocks.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>

namespace dmuon::core {
namespace {

TEST(IdleBlocks, GivesTheSmallestThatIsLargeEnoughOnce) {
  IdleBlocks<char> idle;
  idle.give(30, 'c');
  idle.give(20, 'b');
  idle.give(10, 'a');
  EXPECT_EQ(idle.take(15), std::pair(std::int64_t{20}, 'b'));
  EXPECT_EQ(idle.take(15), std::pair(std::int64_t{30}, 'c'));
  EXPECT_EQ(idle.take(15), std::nullopt);
  EXPECT_EQ(idle.take(10), std::pair(std::int64_t{10}, 'a'));
}

TEST(IdleBlocks, GivesNoneOfMoreThanTwiceTheSize) {
  IdleBlocks<char> idle;
  idle.give(std::numeric_limits<std::int64_t>::max(), 'a');
  idle.give(21, 'b');
  EXPECT_EQ(idle.take(10), std::nullopt);
  EXPECT_EQ(idle.take(0), std::nullopt);
  EXPECT_EQ(idle.take(11), std::pair(std::int64_t{21}, 'b'));
}

TEST(IdleBlocks, FreesTheLargestUntilItIsEnough) {
  const auto block = std::make_shared<int>(1);
  IdleBlocks<std::shared_ptr<int>> idle;
  idle.give(3, block);
  idle.give(4, block);
  EXPECT_EQ(block.use_count(), 3);
  EXPECT_EQ(idle.free_at_least(0), 0);
  EXPECT_EQ(idle.free_at_least(-1), 0);
  EXPECT_EQ(idle.free_at_least(4), 4);
  EXPECT_EQ(block.use_count(), 2);
  EXPECT_EQ(idle.free_at_least(9), 3);
  EXPECT_EQ(block.use_count(), 1);
  EXPECT_EQ(idle.free_at_least(1), 0);
}

}  // namespace
}  // namespace dmuon::core
