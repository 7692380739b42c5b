#include "dmuon/plan/memory.h"

#include <gtest/gtest.h>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

// Elements 16, 16, 32 and 4; of units 32, 32 and 4.
const Inventory kInventory = {{"a", 4, 4, 0}, {"b", 4, 4, 0}, {"c", 8, 4, 1}, {"d", 2, 2, 2}};

// Of state, node copy, buffers, update.
Memory bytes(std::int64_t state, std::int64_t node_copy, std::int64_t buffers,
             std::int64_t update) {
  return {state, node_copy, buffers, update};
}

Options ahead(int lookahead) {
  Options options;
  options.lookahead = lookahead;
  return options;
}

// In 16 bits: the iterate and its spare, and two squares of 4 x 4 or 2 x 2; in the Gram form, for
// 8 x 4, four.
constexpr std::int64_t kOf4x4 = 2 * (2 * 16 + 2 * 16);
constexpr std::int64_t kOf8x4 = 2 * (2 * 32 + 4 * 16);
constexpr std::int64_t kOf2x2 = 2 * (2 * 4 + 2 * 4);

// On 2 x 2.
const PerParameter<Owner> kOwner = oracle::owners({0, 3, 2, 0});
const std::vector<Batch> kBatches = {oracle::batch(0, {0}), oracle::batch(0, {3}),
                                     oracle::batch(2, {2}), oracle::batch(3, {1})};

TEST(Memory, OnTwoByTwoIsWhatItIsByHand) {
  // State 12 an element; the columns' 52 and 16 elements at 2 bytes. In unit 0's backward its
  // weights (64 bytes) and gradients (128), and the other two's gradients, on their way. The
  // updates of unit 0 come first, those of the others beside its weights.
  EXPECT_EQ(
      memory(kInventory, {2, 2}, kOwner, kBatches, ahead(2)),
      (core::PerOwner<Memory>{bytes(240, 104, 64 + 128 + 128 + 16, kOf4x4), bytes(0, 32, 336, 0),
                              bytes(384, 104, 336, 64 + kOf8x4), bytes(192, 32, 336, kOf4x4)}));
}

TEST(Memory, OfStateAndCopiesIsThereAllTheTimeAndTheRestInTurn) {
  EXPECT_EQ(bytes(1, 20, 300, 4000).total(), 4021);
  EXPECT_EQ(bytes(1, 20, 4000, 300).total(), 4021);
}

TEST(Memory, WithoutLookaheadIsThatOfOneUnit) {
  const Memory first = memory(kInventory, {2, 2}, kOwner, kBatches, ahead(0))[Owner(0)];
  EXPECT_EQ(first, bytes(240, 104, 64 + 128, kOf4x4));
}

TEST(Memory, GrowsWithWhatIsInFlight) {
  // Weights and gradients of a unit, then gradients of one more, then of two more.
  const std::int64_t expected[] = {64 + 128, 192 + 128, 320 + 16, 336};
  for (int lookahead = 0; lookahead < 4; ++lookahead) {
    const auto all = memory(kInventory, {2, 2}, kOwner, kBatches, ahead(lookahead));
    EXPECT_EQ(all[Owner(1)].buffers, expected[lookahead]) << lookahead;
  }
  Options options = ahead(3);
  options.max_units_in_flight = 2;
  // No gradients of another unit, but the weights of the next one.
  EXPECT_EQ(memory(kInventory, {2, 2}, kOwner, kBatches, options)[Owner(1)].buffers, 192 + 64);
}

TEST(Memory, IsMoreWhereWeightsStayUntilTheBackward) {
  Options options = ahead(0);
  options.reshard_after_forward = false;
  EXPECT_EQ(memory(kInventory, {2, 2}, kOwner, kBatches, options)[Owner(1)].buffers,
            2 * (32 + 32) + 128);
}

TEST(Memory, WithoutNodeCopiesHasStageOneInItsBuffers) {
  Options options = ahead(2);
  options.node_copy = false;
  options.weight_bytes = 4;
  options.gradient_bytes = 2;
  // Units 0 and 1 have left in part when 2 x 2 is updated.
  EXPECT_EQ(memory(kInventory, {2, 2}, kOwner, kBatches, options)[Owner(0)].update,
            128 + 128 + kOf2x2);
}

TEST(Memory, OnGlooHasInboxesAndKeepsWhatWasFreed) {
  const Inventory inventory = {{"a", 4, 4, 0}};
  const std::vector<Batch> batches = {oracle::batch(0, {0})};
  Options options = ahead(0);
  const auto of = [&] { return memory(inventory, {1, 2}, oracle::owners({0}), batches, options); };
  EXPECT_EQ(of(),
            (core::PerOwner<Memory>{bytes(12 * 16, 0, 32 + 64, kOf4x4), bytes(0, 0, 32 + 64, 0)}));
  options.on_cpu = true;
  EXPECT_EQ(of(), (core::PerOwner<Memory>{bytes(12 * 16, 0, 64 + 64, 64 + 64 + kOf4x4),
                                          bytes(0, 0, 32 + 64, 0)}));
}

TEST(Memory, OfOneSlotHasBuffersAndNoCopies) {
  const std::vector<Batch> batches = {oracle::batch(0, {0, 1}), oracle::batch(1, {2}),
                                      oracle::batch(1, {3})};
  EXPECT_EQ(
      memory(kInventory, {1, 1, 2}, oracle::owners({0, 0, 1, 1}), batches, ahead(0)),
      (core::PerOwner<Memory>{bytes(12 * 34, 0, 96, 2 * kOf4x4), bytes(12 * 34, 0, 96, kOf8x4)}));
}

TEST(Memory, IsSpreadOverTheRanksOfASlotButForTheWorkspace) {
  // Slots of two ranks: the first owns 16 + 32, the second 16 + 4 elements, in one column.
  const PerParameter<Owner> owner = oracle::owners({0, 2, 1, 3});
  const std::vector<Batch> batches = {oracle::batch(0, {0}), oracle::batch(1, {2}),
                                      oracle::batch(2, {1}), oracle::batch(3, {3})};
  EXPECT_EQ(memory(kInventory, {2, 1, 2}, owner, batches, ahead(0)),
            (core::PerOwner<Memory>{bytes(6 * 48, 68, 96, kOf4x4), bytes(6 * 48, 68, 96, kOf8x4),
                                    bytes(6 * 20, 68, 96, kOf4x4), bytes(6 * 20, 68, 96, kOf2x2)}));
}

// A batch that several units wait for is updated for the first of them.
TEST(Memory, OfABatchIsThatOfItsFirstUnit) {
  const std::vector<Batch> batches = {oracle::batch(0, {0, 1}), oracle::batch(0, {2}),
                                      oracle::batch(0, {3})};
  const Inventory inventory = {{"a", 4, 4, 0}, {"b", 4, 4, 1}, {"c", 8, 4, 0}, {"d", 2, 2, 2}};
  EXPECT_EQ(
      memory(inventory, {1, 2}, oracle::owners({0, 0, 0, 0}), batches, ahead(1))[Owner(0)].update,
      2 * kOf4x4);
}

// 2^56 elements, the most there may be, in one unit of several.
TEST(Memory, OfTheLargestInventoryDoesNotOverflow) {
  Inventory inventory = {{"huge", (1 << 28) - 1, 1 << 28, 0}};
  std::vector<Batch> batches = {oracle::batch(0, {0})};
  for (int w = 1; w < 20; ++w) {
    inventory.push_back({core::message("m", w), 1, 1, w});
    batches.push_back(oracle::batch(0, {w}));
  }
  validate(inventory);
  Options options;
  options.weight_bytes = options.gradient_bytes = options.ns_bytes = 8;
  options.lookahead = kMostUnits;
  const auto all = memory(inventory, {2, 2}, PerParameter<Owner>(20), batches, options);
  const std::int64_t huge = inventory.front().num_elements();
  EXPECT_EQ(all[Owner(0)].buffers, 16 * huge + 2 * 8);
  EXPECT_EQ(all[Owner(0)].state, 12 * (huge + 19));
  const std::int64_t side = (1 << 28) - 1;
  EXPECT_EQ(all[Owner(0)].update, 8 * (2 * huge + 2 * side * side));
  EXPECT_GT(all[Owner(0)].total(), all[Owner(0)].update);
}

}  // namespace
}  // namespace dmuon::plan
