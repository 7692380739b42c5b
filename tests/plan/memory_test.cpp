#include "dmuon/plan/memory.h"

#include <gtest/gtest.h>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

// Elements 16, 16, 32 and 4; of units 32, 32 and 4.
const Inventory kInventory = {{"a", 4, 4, 0}, {"b", 4, 4, 0}, {"c", 8, 4, 1}, {"d", 2, 2, 2}};

// Of state, node copy, buffers, workspace.
Memory bytes(std::int64_t state, std::int64_t node_copy, std::int64_t buffers,
             std::int64_t workspace) {
  return {state, node_copy, buffers, workspace};
}

TEST(Memory, OnTwoByTwoIsWhatItIsByHand) {
  Options options;
  options.units_in_flight = 2;
  const PerParameter<Owner> owner = oracle::owners({0, 3, 2, 0});
  const std::vector<Batch> batches = {oracle::batch(0, {0}), oracle::batch(0, {3}),
                                      oracle::batch(2, {2}), oracle::batch(3, {1})};
  // State 12 an element; the columns' 52 and 16 elements at 2 bytes; two units of 32 elements at 2
  // for weights, 4 for gradients, 4 for inboxes; 12 an element of the largest matrix and its
  // square.
  EXPECT_EQ(memory(kInventory, {2, 2}, owner, batches, options),
            (core::PerOwner<Memory>{bytes(240, 104, 640, 12 * 32), bytes(0, 32, 640, 0),
                                    bytes(384, 104, 640, 12 * 48), bytes(192, 32, 640, 12 * 32)}));
  options.node_copy = false;
  options.weight_bytes = 4;
  options.gradient_bytes = 2;
  EXPECT_EQ(memory(kInventory, {2, 2}, owner, batches, options)[Owner(0)],
            bytes(240, 0, 64 * 8, 384));
  options.node_copy = true;
  EXPECT_EQ(memory(kInventory, {2, 2}, owner, batches, options)[Owner(0)],
            bytes(240, 208, 64 * 8, 384));
  EXPECT_EQ(bytes(1, 20, 300, 4000).total(), 4321);
}

TEST(Memory, OfBuffersIsNoMoreThanAllUnitsTake) {
  Options options;
  const std::vector<Batch> batches = {oracle::batch(0, {0, 1}), oracle::batch(0, {2}),
                                      oracle::batch(0, {3})};
  for (const int in_flight : {3, 4, 1 << 30}) {
    options.units_in_flight = in_flight;
    EXPECT_EQ(memory(kInventory, {1, 2}, oracle::owners({0, 0, 0, 0}), batches, options)[Owner(1)],
              bytes(0, 0, 680, 0));
  }
  options.units_in_flight = 1;
  EXPECT_EQ(memory(kInventory, {1, 2}, oracle::owners({0, 0, 0, 0}), batches, options)[Owner(0)],
            bytes(12 * 68, 0, 320, 2 * 12 * 32));
}

TEST(Memory, OfOneSlotHasNeitherBuffersNorCopies) {
  const std::vector<Batch> batches = {oracle::batch(0, {0, 1}), oracle::batch(1, {2}),
                                      oracle::batch(1, {3})};
  EXPECT_EQ(memory(kInventory, {1, 1, 2}, oracle::owners({0, 0, 1, 1}), batches, {}),
            (core::PerOwner<Memory>{bytes(12 * 34, 0, 0, 24 * 32), bytes(12 * 34, 0, 0, 12 * 48)}));
}

TEST(Memory, IsSpreadOverTheRanksOfASlotButForTheWorkspace) {
  Options options;
  options.units_in_flight = 2;
  // Slots of two ranks: the first owns 16 + 32, the second 16 + 4 elements, in one column.
  const PerParameter<Owner> owner = oracle::owners({0, 2, 1, 3});
  const std::vector<Batch> batches = {oracle::batch(0, {0}), oracle::batch(1, {2}),
                                      oracle::batch(2, {1}), oracle::batch(3, {3})};
  EXPECT_EQ(
      memory(kInventory, {2, 1, 2}, owner, batches, options),
      (core::PerOwner<Memory>{bytes(6 * 48, 68, 320, 12 * 32), bytes(6 * 48, 68, 320, 12 * 48),
                              bytes(6 * 20, 68, 320, 12 * 32), bytes(6 * 20, 68, 320, 12 * 8)}));
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
  options.weight_bytes = 8;
  options.gradient_bytes = 8;
  options.units_in_flight = 20;
  const auto all = memory(inventory, {2, 2}, PerParameter<Owner>(20), batches, options);
  const std::int64_t elements = (std::int64_t{1} << 56) - (1 << 28) + 19;
  EXPECT_EQ(all[Owner(0)].buffers, 24 * elements);
  EXPECT_EQ(all[Owner(0)].state, 12 * elements);
  EXPECT_GT(all[Owner(0)].total(), 44 * elements);
}

}  // namespace
}  // namespace dmuon::plan
