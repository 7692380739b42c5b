#include "dmuon/kernels/cuda/product.h"
#include "tests/kernels/cuda/product_case.h"

// The kernel of compute capability 9.0. CMakeLists.txt runs these tests on a device with 54
// clusters and on one with 3, where a cluster has several tiles and runs.
namespace dmuon::kernels::cuda {
namespace {

class Symmetric90Test : public SymmetricTest {
 protected:
  void SetUp() override {
    SymmetricTest::SetUp();
    if (!has_product90(0)) GTEST_SKIP() << "compute capability 9.0 alone";
  }
};

const ProductChoice kWhole{"product90", 1};

TEST_F(Symmetric90Test, EqualsAPlainLoop) {
  const Shape shapes[] = {
      {1, 1, 1, true, false},        // one entry
      {1, 8, 8, false, true},        // without a padded entry
      {2, 39, 30, true, true},       // 7 mod 8; `inner` below a step
      {1, 72, 65, true, false, 0},   // the end of a step beside a stride
      {2, 128, 70, false, false},    // rows of the first block alone
      {1, 131, 64, true, false},     // of both blocks
      {1, 256, 128, true, false},    // a whole tile
      {1, 263, 75, false, true, 0},  // two rows of tiles, of which one has 7 rows
  };
  for (const Shape& shape : shapes) expect_all(shape, {kWhole});
}

// With c alone, whole tiles read it where they add it.
TEST_F(Symmetric90Test, AddsCWithoutADiagonal) {
  for (const std::int64_t m : {128, 200, 263})
    expect_all({2, m, 64, true, false, 8, false, false}, {kWhole});
}

TEST_F(Symmetric90Test, HasThreeTileRows) {
  expect_all({1, 535, 70, true, true}, {kWhole});
  expect_all({2, 640, 64, false, false}, {kWhole});
}

TEST_F(Symmetric90Test, CutsTilesIntoRuns) {
  // Runs that are parts of one tile, and that touch two.
  expect_all({1, 40, 9 * 64 + 3, true, false}, {kWhole, {"product90", 2}, {"product90", 10}});
  expect_all({2, 263, 5 * 64, true, true}, {{"product90", 2}, {"product90", 4}});
  expect_all({1, 391, 4 * 64 - 1, false, false}, {{"product90", 3}, {"product90", 8}});
}

// On a device of 4 clusters: 8 whole tiles, 2 for each, and two that are cut.
TEST_F(Symmetric90Test, ComputesWholeTilesBeforeRuns) {
  expect_all({1, 770, 130, true, false}, {{"product90", 3}});
}

TEST_F(Symmetric90Test, TakesTransposedOperands) {
  const auto transposed = [](Shape shape) {
    shape.transposed = true;
    return shape;
  };
  expect_all(transposed({1, 1, 1, true, false}), {kWhole});
  expect_all(transposed({2, 39, 75, true, true, 0}), {kWhole});
  expect_all(transposed({1, 131, 64, false, false}), {kWhole});
  expect_all(transposed({1, 263, 5 * 64, true, true}), {kWhole, {"product90", 4}});
}

TEST_F(Symmetric90Test, RunsByEachCandidate) {
  const Shape shape{1, 150, 260, true, true};
  const auto choices = candidates(Case(shape, Half::kFp16).describe(), 0);
  const auto is_own = [](const auto& choice) { return choice.kernel == "product90"; };
  EXPECT_GE(std::ranges::count_if(choices, is_own), 2);
  expect_all(shape, choices);
}

TEST_F(Symmetric90Test, HasTheSameBitsInEveryOrderAloneAndInABatch) {
  const Case one({3, 71, 300, true, true}, Half::kFp16);
  for (const int splits : {1, 2, 5}) expect_same_bits(one, {"product90", splits});
  expect_same_bits(Case({2, 263, 200, false, false}, Half::kBFloat16), {"product90", 4});
}

TEST_F(Symmetric90Test, AddsPartsInTheirOrder) { expect_parts_in_their_order({"product90", 3}); }

TEST_F(Symmetric90Test, ReplaysInACapture) { expect_replays({"product90", 2}); }

TEST_F(Symmetric90Test, SaysWhatScratchMemoryRunsTake) {
  Product product;
  product.batch = 2;
  product.m = 263;  // 3 tiles
  product.inner = 1024;
  EXPECT_EQ(num_tickets(product, kWhole, 0), 0);
  EXPECT_EQ(workspace_bytes(product, kWhole, 0), 0);
  constexpr std::int64_t kPart = 128 * 256 * 4;  // a block's sums
  EXPECT_EQ(num_tickets(product, {"product90", 6}, 0), 2 * 3 * 2);
  EXPECT_EQ(workspace_bytes(product, {"product90", 6}, 0), 2 * 3 * 2 * 2 * kPart);
  EXPECT_EQ(workspace_bytes(product, {"product90", 7}, 0), 2 * 3 * 2 * 4 * kPart);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
