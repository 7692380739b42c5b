#include "dmuon/kernels/cuda/product.h"
#include "tests/kernels/cuda/full_case.h"

// Full products by the kernel of compute capability 8.0, and by whatever the device offers.
namespace dmuon::kernels::cuda {
namespace {

const ProductChoice kWhole{"product80_128", 1};
const ProductChoice kSplit{"product80_128", 3};

TEST_F(FullTest, EqualsAPlainLoop) {
  const FullShape shapes[] = {
      {1, 1, 1, 1, true, true},        // one entry
      {1, 8, 16, 8, true, false},      // without a padded entry
      {2, 39, 23, 30, true, true},     // 7 mod 8; `inner` below a step
      {1, 20, 72, 65, true, true, 0},  // the end of a step beside a stride
      {1, 128, 128, 64, true, true},   // a whole tile
  };
  for (const FullShape& shape : shapes) expect_all(shape, {kWhole, kSplit});
}

TEST_F(FullTest, HasSeveralRowsAndColumnsOfTiles) {
  expect_all({1, 135, 263, 33, true, true}, {kWhole});
  expect_all({2, 135, 40, 70, true, false}, {kSplit});
  expect_all({1, 1032, 136, 8, true, false}, {kWhole});  // a band of eight rows, and one more
}

TEST_F(FullTest, RunsByEachCandidate) {
  const FullShape shape{1, 23, 135, 70, true, true};
  const auto choices = candidates(FullCase(shape, Half::kFp16).describe(), 0);
  EXPECT_GE(choices.size(), 3U);
  expect_all(shape, choices);
}

TEST_F(FullTest, WithoutInnerEntriesIsWhatIsAdded) {
  expect_all({1, 15, 31, 0, true, true}, {kWhole});
}

TEST_F(FullTest, HasTheSameBitsInEveryOrderAloneAndInABatch) {
  const FullCase one({2, 71, 140, 100, true, true}, Half::kFp16);
  for (const ProductChoice& choice : {kWhole, kSplit}) expect_same_bits(one, choice);
}

TEST_F(FullTest, MovesWeightsAsMoveWeightsDoes) {
  for (const bool b_transposed : {true, false})
    expect_moves({1, 128, 256, 8, b_transposed, true}, {128, 256}, kWhole);  // whole tiles
  expect_moves({2, 136, 136, 70, true, true}, {131, 133}, kSplit);           // padding left out
  expect_moves({4, 16, 128, 40, true, true}, {16, 125, 2}, kWhole);          // blocks of columns
  expect_moves({4, 128, 128, 8, true, false}, {128, 128, 2, 4}, kWhole);
  expect_moves({1, 136, 136, 8, true, false}, {131, 132, 1, 4}, kWhole);  // in fours, not whole
  expect_moves({1, 128, 136, 8, true, false}, {128, 136, 1, 1, 1, false}, kWhole);  // not in fours
}

TEST_F(FullTest, MovesNoWeightsIfTheStepDoesNotApply) {
  FullShape shape{2, 40, 136, 40, true, true};
  for (const ProductChoice& choice : {kWhole, kSplit})
    expect_moves(shape, {39, 133, 1, 0, 0}, choice);
}

// The kernel of compute capability 9.0. CMakeLists.txt runs these tests on a device with 54
// clusters and on one with 4, where a cluster has several tiles and runs.
class Full90Test : public FullTest {
 protected:
  void SetUp() override {
    FullTest::SetUp();
    if (!has_product90(0)) GTEST_SKIP() << "compute capability 9.0 alone";
  }
};

const ProductChoice kOf90{"product90", 1};

TEST_F(Full90Test, EqualsAPlainLoop) {
  const FullShape shapes[] = {
      {1, 1, 1, 1, true, true},        // one entry
      {1, 8, 16, 8, true, false},      // without a padded entry
      {2, 39, 23, 30, true, true},     // 7 mod 8; `inner` below a step
      {1, 20, 72, 65, true, true, 0},  // the end of a step beside a stride
      {1, 72, 200, 64, true, false},   // rows of the first block alone
      {1, 131, 72, 64, true, true},    // columns of the first half alone
      {1, 256, 256, 128, true, true},  // a whole tile
      {1, 263, 263, 75, true, true},   // 2 x 2 tiles, of which some have 7 rows or columns
  };
  for (const FullShape& shape : shapes) expect_all(shape, {kOf90});
}

TEST_F(Full90Test, CutsTilesIntoRuns) {
  expect_all({1, 40, 72, 9 * 64 + 3, true, true}, {{"product90", 2}, {"product90", 10}});
  expect_all({2, 263, 40, 5 * 64, true, false}, {{"product90", 3}});
}

// On a device of 4 clusters: 8 whole tiles, 2 for each, and one that is cut.
TEST_F(Full90Test, ComputesWholeTilesBeforeRuns) {
  expect_all({1, 2056, 40, 70, true, true}, {{"product90", 2}});
}

TEST_F(Full90Test, HasTheSameBitsInEveryOrderAloneAndInABatch) {
  const FullCase one({3, 71, 140, 300, true, true}, Half::kFp16);
  for (const int splits : {1, 5}) expect_same_bits(one, {"product90", splits});
}

TEST_F(Full90Test, MovesWeightsAsMoveWeightsDoes) {
  for (const bool b_transposed : {true, false}) {
    expect_moves({1, 256, 256, 64, b_transposed, true}, {256, 256}, kOf90);
    expect_moves({2, 136, 264, 200, b_transposed, true}, {131, 261}, {"product90", 3});
  }
  expect_moves({4, 16, 128, 40, true, true}, {16, 125, 2}, kOf90);
  expect_moves({1, 128, 136, 40, true, false}, {128, 136, 1, 1, 1, false}, kOf90);
}

TEST_F(Full90Test, MovesNoWeightsIfTheStepDoesNotApply) {
  expect_moves({2, 40, 136, 200, true, true}, {39, 133, 1, 0, 0}, kOf90);
  expect_moves({2, 40, 136, 200, true, true}, {39, 133, 1, 0, 0}, {"product90", 3});
}

}  // namespace
}  // namespace dmuon::kernels::cuda
