#include "dmuon/plan/workspace.h"

#include <gtest/gtest.h>

namespace dmuon::plan {
namespace {

std::int64_t bytes(const Shape& shape, std::size_t num_batch, int ns_bytes, int ns_steps = 5) {
  PlanOptions options;
  options.ns_bytes = ns_bytes;
  options.ns_steps = ns_steps;
  return workspace_bytes(shape, num_batch, options);
}

TEST(Workspace, IsTheIterateItsSpareAndTwoSquaresInTheDirectForm) {
  EXPECT_EQ(bytes({10, 10}, 1, 2), 2 * (2 * 100 + 2 * 100));
  EXPECT_EQ(bytes({10, 10}, 7, 4), 7 * 4 * (2 * 100 + 2 * 100));
}

TEST(Workspace, HasFourSquaresOfTheShortSideInTheGramForm) {
  EXPECT_EQ(bytes({10, 40}, 3, 2), 3 * 2 * (2 * 400 + 4 * 100));
  EXPECT_EQ(bytes({40, 10}, 3, 2), bytes({10, 40}, 3, 2));
}

TEST(Workspace, OnCpusHasThemInFp32TooWhereItIsIn16Bits) {
  PlanOptions options;
  options.on_cpu = true;
  options.ns_bytes = 2;
  EXPECT_EQ(workspace_bytes({10, 40}, 3, options), 3 * (2 * 2 * 400 + 4 * 6 * 100));
  EXPECT_EQ(workspace_bytes({10, 10}, 3, options), bytes({10, 10}, 3, 2));
  options.ns_bytes = 4;
  EXPECT_EQ(workspace_bytes({10, 40}, 3, options), bytes({10, 40}, 3, 4));
}

// One step takes the same products in both forms, and the tie goes to the direct one.
TEST(Workspace, IsThatOfTheFormThatTheIterationTakes) {
  EXPECT_EQ(bytes({10, 20}, 1, 2, 5), 2 * (2 * 200 + 4 * 100));
  EXPECT_EQ(bytes({10, 20}, 1, 2, 1), 2 * (2 * 200 + 2 * 100));
}

TEST(Workspace, OfAStackIsThatOfABatchOfItsMatrices) {
  EXPECT_EQ(bytes({10, 40, false, 6}, 2, 2), bytes({10, 40}, 12, 2));
  EXPECT_EQ(bytes({1, 100, false, 6}, 2, 2), bytes({1, 100}, 12, 2));
}

// Of a long matrix the squares are nothing: then the most is before the iteration, while the fp32
// update is rounded.
TEST(Workspace, IsTheUpdateAndTheRoundedOneWhereSquaresAreSmall) {
  EXPECT_EQ(bytes({1, 100}, 2, 2), 2 * (4 + 2) * 100);
  EXPECT_EQ(bytes({1, 100}, 2, 4), 2 * 4 * (2 * 100 + 4));
}

// They are copied apart in fp32 before that.
TEST(Workspace, OfBlocksOfColumnsHoldsTheUpdateTwiceWhereThatIsTheMost) {
  const Shape blocks{1, 100, false, 6, 6};
  EXPECT_EQ(bytes(blocks, 2, 2), 12 * (4 + 4) * 100);
  EXPECT_EQ(bytes({10, 40, false, 6, 3}, 2, 4), bytes({10, 40}, 12, 4));
}

}  // namespace
}  // namespace dmuon::plan
