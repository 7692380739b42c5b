#include "dmuon/plan/division.h"

#include <gtest/gtest.h>

#include <string>

#include "dmuon/core/error.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

// By hand: a 2 x 2 matrix counts 8, a 4 x 5 one 80.
TEST(Divide, MakesEqualPartsOfAtMostAnEighthOfAnOwnersShare) {
  const Inventory divided = oracle::divide_small(
      {{"small", {1, 2, 2}, 0}, {"stack", {12, 2, 2}, 1}, {"last", {1, 2, 2}, 2}}, {1, 4});
  // (8 + 96 + 8) / 4 / 8 = 3.5 is less than one matrix has.
  ASSERT_EQ(divided.size(), 14);
  EXPECT_EQ(divided[ParameterIndex(1)], (Parameter{"stack[0:1]", {1, 2, 2}, 1}));
  EXPECT_EQ(divided[ParameterIndex(12)], (Parameter{"stack[11:12]", {1, 2, 2}, 1, false, true}));
  EXPECT_EQ(divided[ParameterIndex(13)], (Parameter{"last", {1, 2, 2}, 2}));
  // 1,600 of work on 2 owners: at most 100 a part, which 12 matrices of 8 have.
  Inventory large{{"stack", {60, 2, 2}, 0}};
  for (int i = 0; i < 14; ++i) large.push_back({"large " + std::to_string(i), {1, 4, 5}, 1});
  large.push_back({"x", {1, 2, 2}, 1});  // 480 + 14 * 80
  const Inventory parts = oracle::divide_small(large, {1, 2});
  ASSERT_EQ(parts.size(), 5 + 15);
  EXPECT_EQ(parts[ParameterIndex(4)], (Parameter{"stack[48:60]", {12, 2, 2}, 0, false, true}));
}

TEST(Divide, MakesNoPartSmallerThanItShouldBe) {
  const Inventory stack{{"stack", {12, 4, 8}, 0}};  // 384 elements
  EXPECT_EQ(divide(stack, {1, 4}), stack);
  EXPECT_EQ(divide(stack, {1, 4}, 193), stack);
  EXPECT_EQ(divide(stack, {1, 4}, 192).size(), 2);
  EXPECT_EQ(divide(stack, {1, 4}, 72).size(), 4);  // 5 does not divide 12
  EXPECT_EQ(divide(stack, {1, 4}, 32).size(), 12);
  EXPECT_THROW(divide(stack, {1, 4}, 0), core::InvalidArgument);
  const Inventory large{{"stack", {4, 512, 1024}, 0}};
  EXPECT_EQ(divide(large, {1, 2}).size(), 4);
}

TEST(Divide, LeavesAloneWhatIsSmallOrHasPartsOrHasOneOwner) {
  const Inventory stack{{"stack", {60, 2, 2}, 0}};
  EXPECT_EQ(oracle::divide_small(stack, {1, 1}), stack);
  EXPECT_EQ(oracle::divide_small({}, {1, 4}), Inventory{});
  const Inventory parts{{"q", {60, 2, 2}, 0}, {"k", {60, 1, 2}, 0, false, true}};
  EXPECT_EQ(oracle::divide_small(parts, {2, 4}), parts);
  Inventory many;
  for (int i = 0; i < 100; ++i) many.push_back({"s" + std::to_string(i), {2, 2, 2}, 0});
  EXPECT_EQ(oracle::divide_small(many, {1, 2}), many);
}

// By hand: a block of 2 x 2 counts 8 as a matrix does. A part that were half of "wide" would not be
// in one piece of memory.
TEST(Divide, KeepsBlocksOfColumnsTogether) {
  const Parameter wide{"wide", {1, 2, 24, 12, true}, 0};
  EXPECT_EQ(oracle::divide_small({wide}, {1, 4}), Inventory{wide});
  const Inventory divided =
      oracle::divide_small({{"stack", {6, 2, 8, 4}, 0}, {"x", {1, 2, 2}, 0}}, {1, 4});
  ASSERT_EQ(divided.size(), 7);
  EXPECT_EQ(divided[ParameterIndex(5)], (Parameter{"stack[5:6]", {1, 2, 8, 4}, 0, false, true}));
  // 48 blocks of 4 x 2 count 16 each: 768 and 224 * 8 are 2560, on 2 owners at most 160 a part.
  Inventory many{{"stack", {12, 4, 8, 4}, 0}};
  for (int i = 0; i < 224; ++i) many.push_back({"x" + std::to_string(i), {1, 2, 2}, 0});
  EXPECT_EQ(oracle::divide_small(many, {1, 2}).size(), 6 + 224);
}

// Heads are divided; parts of all heads together have one owner.
TEST(Divide, KeepsInterleavedPartsTogether) {
  const Inventory divided = oracle::divide_small(
      {{"heads", {4, 6, 2, 1, false, {4, 2}}, 0}, {"parts", {1, 24, 2, 1, false, {4, 2}}, 0}},
      {1, 4});
  ASSERT_EQ(divided.size(), 5);
  EXPECT_EQ(divided[ParameterIndex(3)],
            (Parameter{"heads[3:4]", {1, 6, 2, 1, false, {4, 2}}, 0, false, true}));
  EXPECT_EQ(divided[ParameterIndex(4)], (Parameter{"parts", {1, 24, 2, 1, false, {4, 2}}, 0}));
}

TEST(Join, KeepsLayoutsApart) {
  const Inventory blocks{{"s", {6, 2, 8, 4}, 0}, {"x", {1, 2, 2}, 0}};
  EXPECT_EQ(join(oracle::divide_small(blocks, {1, 4})), blocks);
  const Inventory views{{"q[0:1]", {1, 2, 4, 2}, 0},
                        {"q[1:2]", {1, 2, 4}, 0, false, true},
                        {"q[2:3]", {1, 2, 4, 1, true}, 0, false, true}};
  EXPECT_EQ(join(views), views);
}

TEST(Join, UndoesDivision) {
  const Inventory stacks{{"a", {1, 4, 4}, 0}, {"s[0]", {12, 2, 2}, 1}, {"t", {7, 3, 2}, 1}};
  const Inventory divided = oracle::divide_small(stacks, {1, 4});
  ASSERT_GT(divided.size(), 15);
  EXPECT_EQ(join(divided), stacks);
  EXPECT_EQ(join(oracle::divide_small(stacks, {1, 2})), stacks);
  const Inventory views{{"q[0:4]", {4, 4, 4}, 0}, {"q[4:6]", {2, 2, 4}, 0, false, true}};
  EXPECT_EQ(join(views), views);
}

// A stack of 8 that expert parallelism has cut between two columns.
Inventory cut_stack() {
  return {{"s[0:4]", {4, 2, 2}, 0, false, false, core::Shard(0)},
          {"s[4:8]", {4, 2, 2}, 0, false, true, core::Shard(1)}};
}

TEST(Divide, DividesAColumnsPartBetweenItsNodes) {
  EXPECT_EQ(oracle::divide_small(cut_stack(), {1, 2}), cut_stack());  // whose owner is the only one
  const Inventory divided = oracle::divide_small(cut_stack(), {2, 2});
  ASSERT_EQ(divided.size(), 8);
  EXPECT_EQ(divided[ParameterIndex(0)],
            (Parameter{"s[0:1]", {1, 2, 2}, 0, false, false, core::Shard(0)}));
  EXPECT_EQ(divided[ParameterIndex(4)],
            (Parameter{"s[4:5]", {1, 2, 2}, 0, false, true, core::Shard(1)}));
  EXPECT_EQ(join(divided), cut_stack());
}

// Columns 0 and 1 of 2 x 2: owners 0, 2 and 1, 3.
TEST(WithNeighboursTogether, SortsEqualPartsOfALeafByColumnAndOwner) {
  const Inventory inventory{{"a", {1, 2, 2}, 0},
                            {"s0", {1, 2, 2}, 0},
                            {"s1", {1, 2, 2}, 0, false, true},
                            {"s2", {1, 3, 2}, 0, false, true},
                            {"s3", {1, 2, 2}, 0, false, true},
                            {"s4", {1, 2, 2}, 0, false, true},
                            {"b", {1, 2, 2}, 0}};
  EXPECT_EQ(with_neighbours_together(inventory, {2, 2}, oracle::owners({3, 3, 1, 2, 2, 0, 0})),
            oracle::owners({3, 0, 2, 2, 1, 3, 0}));
}

TEST(WithNeighboursTogether, LeavesPartsOfAColumnToItsRanks) {
  const Inventory halves = oracle::divide_small(cut_stack(), {2, 2});
  EXPECT_EQ(with_neighbours_together(halves, {2, 2}, oracle::owners({2, 0, 2, 0, 1, 3, 1, 3})),
            oracle::owners({0, 0, 2, 2, 1, 1, 3, 3}));
}

}  // namespace
}  // namespace dmuon::plan
