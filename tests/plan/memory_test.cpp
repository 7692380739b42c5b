#include "dmuon/plan/memory.h"

#include <gtest/gtest.h>

#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

// Elements 256, 256, 512 and 128; of units 512, 512 and 128.
const Inventory kInventory = {
    {"a", {1, 16, 16}, 0}, {"b", {1, 16, 16}, 0}, {"c", {1, 32, 16}, 1}, {"d", {1, 16, 8}, 2}};

// The same over the ranks of tensor parallelism.
Inventory cut() {
  Inventory inventory = kInventory;
  for (Parameter& parameter : inventory) parameter.tensor_parallel = true;
  return inventory;
}

// Bytes of a unit of 512 elements.
constexpr std::int64_t kWeights = 2 * 512;
constexpr std::int64_t kGradients = 4 * 512;

// Of state, node copy, buffers, update.
Memory bytes(std::int64_t state, std::int64_t node_copy, std::int64_t buffers,
             std::int64_t update) {
  return {state, node_copy, buffers, update};
}

PlanOptions ahead(int lookahead) {
  PlanOptions options;
  options.lookahead = lookahead;
  return options;
}

// Updates in 16 bits: the iterate and its spare, and two squares; in the Gram form, of those that
// are not square, four.
constexpr std::int64_t kOfA = 2 * (2 * 256 + 2 * 256);
constexpr std::int64_t kOfC = 2 * (2 * 512 + 4 * 256);
constexpr std::int64_t kOfD = 2 * (2 * 128 + 4 * 64);

// An element: of two batches, directions in fp32 and results, as they are sent and received.
constexpr std::int64_t kExchange = 2 * 2 * (4 + 2);

// On 2 x 2.
const PerParameter<Owner> kOwner = oracle::owners({0, 3, 2, 0});
const std::vector<Batch> kBatches = {oracle::batch(0, {0}), oracle::batch(0, {3}),
                                     oracle::batch(2, {2}), oracle::batch(3, {1})};

TEST(Memory, OnTwoByTwoIsWhatItIsByHand) {
  // State 12 an element; the columns' 896 and 256 elements at 2 bytes. In unit 0's backward its
  // weights and gradients, and unit 1's gradients on their way, which become the first column's
  // mean of the node, as unit 2's have. All updates run beside unit 0's weights, whose buffer is
  // taken when their publication is issued.
  const std::int64_t buffers = kWeights + 2 * kGradients;
  const std::int64_t with_mean = buffers + 4 * 512 + 4 * 128;
  EXPECT_EQ(memory(kInventory, {2, 2}, kOwner, kBatches, ahead(2)),
            (core::PerOwner<Memory>{bytes(12 * 384, 2 * 896, with_mean, kWeights + kOfA),
                                    bytes(0, 2 * 256, buffers, 0),
                                    bytes(12 * 512, 2 * 896, with_mean, kWeights + kOfC),
                                    bytes(12 * 256, 2 * 256, buffers, kWeights + kOfA)}));
}

TEST(Memory, OfStateAndCopiesIsThereAllTheTimeAndTheRestInTurn) {
  EXPECT_EQ(bytes(1, 20, 300, 4000).total(), 4021);
  EXPECT_EQ(bytes(1, 20, 4000, 300).total(), 4021);
}

// Of unit 1 with the node's mean of it, which is all in the first column; of unit 0.
TEST(Memory, WithoutLookaheadIsThatOfOneUnit) {
  const auto all = memory(kInventory, {2, 2}, kOwner, kBatches, ahead(0));
  EXPECT_EQ(all[Owner(0)], bytes(12 * 384, 2 * 896, kGradients + kGradients, kOfA));
  EXPECT_EQ(all[Owner(1)], bytes(0, 2 * 256, kWeights + kGradients, 0));
}

TEST(Memory, GrowsWithWhatIsInFlight) {
  // Weights and gradients of a unit, then gradients of one more, and on one node of two more.
  const std::int64_t one = kWeights + kGradients;
  const std::int64_t two = one + kGradients;
  const std::int64_t between_nodes[] = {one, two, two, two};
  const std::int64_t on_one_node[] = {one, two, two + 4 * 128, two + 4 * 128};
  for (int lookahead = 0; lookahead < 4; ++lookahead) {
    const auto all = memory(kInventory, {2, 2}, kOwner, kBatches, ahead(lookahead));
    EXPECT_EQ(all[Owner(1)].buffers, between_nodes[lookahead]) << lookahead;
    const auto node = memory(kInventory, {1, 4}, kOwner, kBatches, ahead(lookahead));
    EXPECT_EQ(node[Owner(1)].buffers, on_one_node[lookahead]) << lookahead;
  }
  PlanOptions options = ahead(3);
  options.max_units_in_flight = 100;
  // The nodes' means of units 1 and 2.
  EXPECT_EQ(memory(kInventory, {2, 2}, kOwner, kBatches, options)[Owner(0)].buffers,
            two + 4 * (512 + 128));
  options.max_units_in_flight = 2;
  // No gradients of another unit, but the weights of the next one.
  EXPECT_EQ(memory(kInventory, {2, 2}, kOwner, kBatches, options)[Owner(1)].buffers,
            one + kWeights);
}

TEST(Memory, IsMoreWhereWeightsStayUntilTheBackward) {
  PlanOptions options = ahead(0);
  options.reshard_after_forward = false;
  EXPECT_EQ(memory(kInventory, {2, 2}, kOwner, kBatches, options)[Owner(1)].buffers,
            2 * kWeights + kGradients);
}

TEST(Memory, WithoutNodeCopiesHasStageOneInItsBuffers) {
  PlanOptions options = ahead(2);
  options.node_copy = false;
  options.weight_bytes = 4;
  options.gradient_bytes = 2;
  // Units 0 and 1 have buffers when a and d are updated.
  EXPECT_EQ(memory(kInventory, {2, 2}, kOwner, kBatches, options)[Owner(0)].update,
            2 * (4 * 512) + kOfA);
}

TEST(Memory, OnGlooHasInboxesAndKeepsWhatWasFreed) {
  const Inventory inventory = {{"a", {1, 16, 16}, 0}};
  const std::vector<Batch> batches = {oracle::batch(0, {0})};
  PlanOptions options = ahead(0);
  const auto of = [&] { return memory(inventory, {1, 2}, oracle::owners({0}), batches, options); };
  EXPECT_EQ(of(), (core::PerOwner<Memory>{bytes(12 * 256, 0, 512 + 1024, kOfA),
                                          bytes(0, 0, 512 + 1024, 0)}));
  options.on_cpu = true;
  EXPECT_EQ(of(), (core::PerOwner<Memory>{bytes(12 * 256, 0, 1024 + 1024, 2048 + kOfA),
                                          bytes(0, 0, 512 + 1024, 0)}));
}

// 15 elements fill as much as 128, and are owned as 15.
TEST(Memory, OfBuffersAndCopiesIsOfAlignedMatrices) {
  const Inventory inventory = {{"a", {1, 3, 5}, 0}, {"b", {1, 16, 8}, 0}};
  const std::vector<Batch> batches = {oracle::batch(0, {0}), oracle::batch(1, {1})};
  const Memory first =
      memory(inventory, {2, 1}, oracle::owners({0, 1}), batches, ahead(0))[Owner(0)];
  EXPECT_EQ(first, bytes(12 * 15, 2 * 256, (4 + 4) * 256, first.update));
}

TEST(Memory, OfOneSlotHasBuffersAndNoCopies) {
  const std::vector<Batch> batches = {oracle::batch(0, {0, 1}), oracle::batch(1, {2}),
                                      oracle::batch(1, {3})};
  EXPECT_EQ(memory(cut(), {1, 1, 2}, oracle::owners({0, 0, 1, 1}), batches, ahead(0)),
            (core::PerOwner<Memory>{bytes(6 * 1152, 0, 1536, 2 * kOfA + kExchange * 512),
                                    bytes(6 * 1152, 0, 1536, kOfC + kExchange * 512)}));
  // Each rank has whole what is not cut. Two batches have three copies of their results.
  EXPECT_EQ(memory(kInventory, {1, 1, 2}, oracle::owners({0, 0, 1, 1}), batches, ahead(0)),
            (core::PerOwner<Memory>{bytes(12 * 1152, 0, 2 * 1536, 2 * kOfA + 2 * 3 * 2 * 512),
                                    bytes(12 * 1152, 0, 2 * 1536, kOfC + 2 * 3 * 2 * 512)}));
}

TEST(Memory, IsSpreadOverTheRanksOfASlotButForTheWorkspace) {
  // Slots of two ranks: the first owns 256 + 512, the second 256 + 128 elements, in one column.
  const PerParameter<Owner> owner = oracle::owners({0, 2, 1, 3});
  const std::vector<Batch> batches = {oracle::batch(0, {0}), oracle::batch(1, {2}),
                                      oracle::batch(2, {1}), oracle::batch(3, {3})};
  EXPECT_EQ(memory(cut(), {2, 1, 2}, owner, batches, ahead(0)),
            (core::PerOwner<Memory>{bytes(6 * 768, 1152, 2048, kOfA + kExchange * 256),
                                    bytes(6 * 768, 1152, 2048, kOfC + kExchange * 512),
                                    bytes(6 * 384, 1152, 2048, kOfA + kExchange * 256),
                                    bytes(6 * 384, 1152, 2048, kOfD + kExchange * 128)}));
}

// The first unit's 768 elements, beside the larger update: of both a and b, or of c.
TEST(Memory, OfAnUpdateIsBesideTheWeightsThatAreSentAhead) {
  const std::vector<Batch> batches = {oracle::batch(0, {0, 1}), oracle::batch(0, {2}),
                                      oracle::batch(0, {3})};
  const Inventory inventory = {
      {"a", {1, 16, 16}, 0}, {"b", {1, 16, 16}, 1}, {"c", {1, 32, 16}, 0}, {"d", {1, 16, 8}, 2}};
  EXPECT_EQ(
      memory(inventory, {1, 2}, oracle::owners({0, 0, 0, 0}), batches, ahead(1))[Owner(0)].update,
      2 * 768 + 2 * kOfA);
}

// 2^56 elements, the most there may be, in one unit of several.
TEST(Memory, OfTheLargestInventoryDoesNotOverflow) {
  Inventory inventory = {{"huge", {1, (1 << 28) - 1, 1 << 28}, 0}};
  std::vector<Batch> batches = {oracle::batch(0, {0})};
  for (int w = 1; w < 20; ++w) {
    inventory.push_back({core::message("m", w), {1, 1, 1}, w});
    batches.push_back(oracle::batch(0, {w}));
  }
  validate(inventory);
  PlanOptions options;
  options.weight_bytes = options.gradient_bytes = options.ns_bytes = 8;
  options.lookahead = schedule::kMostUnits;
  const auto all = memory(inventory, {2, 2}, PerParameter<Owner>(20), batches, options);
  const std::int64_t huge = inventory.front().num_elements();
  // Beside it the gradients of one unit, and the nodes' means of all others.
  EXPECT_EQ(all[Owner(0)].buffers, 16 * huge + (1 + 19) * 8 * 128);
  EXPECT_EQ(all[Owner(0)].state, 12 * (huge + 19));
  const std::int64_t side = (1 << 28) - 1;
  EXPECT_EQ(all[Owner(0)].update, 8 * huge + 8 * (2 * huge + 2 * side * side));
  EXPECT_GT(all[Owner(0)].total(), all[Owner(0)].update);
}

}  // namespace
}  // namespace dmuon::plan
