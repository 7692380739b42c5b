#include "dmuon/plan/state_bytes.h"

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

// 2 parameters' worth of blocks: rows, cols, -, matrices.
constexpr Shape kMatrices{6, 10, false, 4};

TEST(StateBytes, OfMuonAreMasterGradientAndMomentum) {
  EXPECT_EQ(state_bytes(kMatrices, "muon"), 12 * 240);
}

TEST(StateBytes, OfNorMuonHaveAValueMoreForEachRowOfAnOutByInMatrix) {
  Shape shape = kMatrices;
  EXPECT_EQ(state_bytes(shape, "normuon"), 12 * 240 + 4 * 4 * 6);
  shape.transposed = true;
  EXPECT_EQ(state_bytes(shape, "normuon"), 12 * 240 + 4 * 4 * 10);
}

TEST(StateBytes, OfAdaMuonHaveAValueMoreForEachElement) {
  EXPECT_EQ(state_bytes(kMatrices, "adamuon"), 16 * 240);
}

TEST(StateBytes, OfAUsersRuleFollowFromTheSizesInItsName) {
  Shape shape = kMatrices;
  EXPECT_EQ(state_bytes(shape, "mine[]"), 12 * 240);
  constexpr const char* kAll = "mine[1 x 1, rows x 2, 3 x cols, rows x cols, 2 x 5]";
  EXPECT_EQ(state_bytes(shape, kAll), 16 * 240 + 4 * 4 * (1 + 2 * 6 + 3 * 10 + 10));
  shape.transposed = true;
  EXPECT_EQ(state_bytes(shape, kAll), 16 * 240 + 4 * 4 * (1 + 2 * 10 + 3 * 6 + 10));
  EXPECT_EQ(rule_update_bytes("mine[rows x 1]"), 3 * 4);
  EXPECT_EQ(rule_update_bytes(kAll), 4 * 4);
}

TEST(StateBytes, OfAUsersRuleAreRefusedIfTheyAreMalformedOrTooMany) {
  for (const char* rule : {"", "[1 x 1]", "mine", "mine[", "mine[1]", "mine[cols x rows]",
                           "mine[0 x 1]", "mine[1 x 1025]", "mine[1 x -1]", "mine[1 x 1,1 x 1]",
                           "mine[1 x 1] ", "mine[x]", "mine[1 x 1, ]"})
    EXPECT_THROW(require_rule(rule), core::InvalidArgument) << rule;
  const Shape most{kMaxSide, 1, false, 1 << 25};
  EXPECT_THROW(state_bytes(most, "mine[rows x 1024]"), core::InvalidArgument);
}

TEST(StateBytes, OfAnUnknownRuleAreRefusedWithTheKnownNames) {
  try {
    state_bytes(kMatrices, "another");
    FAIL() << "accepted";
  } catch (const core::InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("rule: expected one of muon, normuon"),
              std::string::npos)
        << error.what();
  }
}

TEST(StateBytes, AreThoseOfAPlansMemory) {
  const Inventory inventory = {{"a", {3, 6, 20, 2}, 0}, {"b", {1, 6, 10, 1, true}, 0}};
  PlanOptions options;
  options.rule = "normuon";
  const Plan plan = make_plan(inventory, {1, 1}, "rank0", oracle::modelled(inventory), options);
  EXPECT_EQ(plan.memory[Owner(0)].state, 12 * (360 + 60) + 4 * (3 * 2 * 6 + 10));
}

}  // namespace
}  // namespace dmuon::plan
