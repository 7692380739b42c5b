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
  EXPECT_EQ(bytes({16, 16}, 1, 2), 2 * (2 * 256 + 2 * 256));
  EXPECT_EQ(bytes({16, 16}, 7, 4), 7 * 4 * (2 * 256 + 2 * 256));
}

TEST(Workspace, HasFourSquaresOfTheShortSideInTheGramForm) {
  EXPECT_EQ(bytes({16, 64}, 3, 2), 3 * 2 * (2 * 1024 + 4 * 256));
  EXPECT_EQ(bytes({64, 16}, 3, 2), bytes({16, 64}, 3, 2));
}

TEST(Workspace, HasAnFp32CopyOfAnUpdateThatTheRuleChanges) {
  PlanOptions options;
  const std::int64_t plain = workspace_bytes({16, 64}, 3, options);
  options.rule = "normuon";
  EXPECT_EQ(workspace_bytes({16, 64}, 3, options), plain + 3 * 4 * 1024);
  options.rule = "adamuon";  // and one of its squares
  EXPECT_EQ(workspace_bytes({16, 64}, 3, options), plain + 2 * 3 * 4 * 1024);
}

TEST(Workspace, OnCpusHasThemInFp32TooWhereItIsIn16Bits) {
  PlanOptions options;
  options.on_cpu = true;
  options.ns_bytes = 2;
  EXPECT_EQ(workspace_bytes({16, 64}, 3, options), 3 * (2 * 2 * 1024 + 4 * 6 * 256));  // a piece
  EXPECT_EQ(workspace_bytes({16, 16}, 3, options), bytes({16, 16}, 3, 2));
  options.ns_bytes = 4;
  EXPECT_EQ(workspace_bytes({16, 64}, 3, options), bytes({16, 64}, 3, 4));
}

TEST(Workspace, OnCpusIsThatOfOneLargeMatrix) {
  PlanOptions options;
  options.on_cpu = true;
  options.ns_bytes = 4;
  EXPECT_EQ(workspace_bytes({512, 2048}, 4, options), bytes({512, 2048}, 1, 4));
  EXPECT_EQ(workspace_bytes({512, 2048, false, 6}, 2, options), bytes({512, 2048}, 1, 4));
  options.on_cpu = false;
  EXPECT_EQ(workspace_bytes({512, 2048}, 4, options), 4 * bytes({512, 2048}, 1, 4));
}

TEST(Workspace, OnCpusIsThatOfSmallMatricesWhichCachesHold) {
  PlanOptions options;
  options.on_cpu = true;
  options.ns_bytes = 4;
  EXPECT_EQ(workspace_bytes({64, 64}, 10, options), bytes({64, 64}, 10, 4));
  EXPECT_EQ(workspace_bytes({64, 64}, 1000, options), bytes({64, 64}, 1000, 4));
}

TEST(Workspace, RoundsSidesUpTo8OnAcceleratorsIn16Bits) {
  EXPECT_EQ(bytes({9, 60}, 3, 2), bytes({16, 64}, 3, 2));
  EXPECT_LT(bytes({9, 60}, 3, 4), bytes({16, 64}, 3, 4));
  PlanOptions options;
  options.on_cpu = true;
  options.ns_bytes = 2;
  EXPECT_LT(workspace_bytes({9, 60}, 3, options), workspace_bytes({16, 64}, 3, options));
}

// One step takes the same products in both forms, and the tie goes to the direct one.
TEST(Workspace, IsThatOfTheFormThatTheIterationTakes) {
  EXPECT_EQ(bytes({16, 32}, 1, 2, 5), 2 * (2 * 512 + 4 * 256));
  EXPECT_EQ(bytes({16, 32}, 1, 2, 1), 2 * (2 * 512 + 2 * 256));
}

TEST(Workspace, OfAStackIsThatOfABatchOfItsMatrices) {
  EXPECT_EQ(bytes({16, 64, false, 6}, 2, 2), bytes({16, 64}, 12, 2));
  EXPECT_EQ(bytes({8, 800, false, 6}, 2, 2), bytes({8, 800}, 12, 2));
}

// Of a long matrix the squares are nothing: then the most is before the iteration, while the fp32
// update is rounded.
// Parts of 16 and of 32 rows. What is gathered are two fp32 values an element.
TEST(Workspace, OfInterleavedRowsIsThatOfTheirPartsAndOfGatheredOperands) {
  const Shape shape{48, 64, false, 1, 1, false, {4, 8}};
  EXPECT_EQ(bytes(shape, 3, 2), bytes({16, 64}, 3, 2) + bytes({32, 64}, 3, 2) + 3 * 8 * 48 * 64);
  PlanOptions options;
  options.on_cpu = true;
  options.ns_bytes = 4;
  EXPECT_EQ(workspace_bytes(shape, 3, options),
            workspace_bytes({32, 64}, 3, options) + 3 * 8 * 32 * 64);
}

TEST(Workspace, IsTheUpdateAndTheRoundedOneWhereSquaresAreSmall) {
  EXPECT_EQ(bytes({8, 800}, 2, 2), 2 * (4 + 2) * 6400);
  EXPECT_EQ(bytes({8, 800}, 2, 4), 2 * 4 * (2 * 6400 + 4 * 64));
}

// They are copied apart in fp32 before that.
TEST(Workspace, OfBlocksOfColumnsHoldsTheUpdateTwiceWhereThatIsTheMost) {
  const Shape blocks{8, 800, false, 6, 6};
  EXPECT_EQ(bytes(blocks, 2, 2), 12 * (4 + 4) * 6400);
  EXPECT_EQ(bytes({16, 64, false, 6, 3}, 2, 4), bytes({16, 64}, 12, 4));
}

}  // namespace
}  // namespace dmuon::plan
