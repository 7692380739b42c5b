#include "dmuon/kernels/cuda/product.h"
#include "tests/kernels/cuda/product_case.h"

// The kernels of compute capability 8.0, and whatever the device offers.
namespace dmuon::kernels::cuda {
namespace {

const std::vector<ProductChoice> kChoices{
    {"product80_64", 1}, {"product80_64", 3}, {"product80_128", 1}, {"product80_128", 2}};

TEST_F(SymmetricTest, EqualsAPlainLoop) {
  const Shape shapes[] = {
      {1, 1, 1, true, false},       // one entry
      {1, 8, 8, false, true},       // without a padded entry
      {2, 39, 30, true, true},      // 7 mod 8; `inner` below a step: splits without one
      {1, 72, 65, true, false, 0},  // the end of a step beside a stride
      {2, 67, 3, false, false},     // two tile rows of the small kernel
  };
  for (const Shape& shape : shapes) expect_all(shape, kChoices);
}

TEST_F(SymmetricTest, HasThreeTileRowsOrMore) {
  expect_all({2, 263, 141, true, true}, {{"product80_64", 1}, {"product80_64", 2}});
  expect_all({2, 263, 75, true, false}, {{"product80_128", 1}, {"product80_128", 2}});
  expect_all({1, 391, 40, false, true}, {{"product80_128", 1}});
}

TEST_F(SymmetricTest, RunsThroughItsStagesSeveralTimes) {
  expect_all({1, 23, 8 * 64 + 3, false, true}, {{"product80_64", 1}, {"product80_64", 8}});
  expect_all({1, 23, 8 * 32 + 3, false, true}, {{"product80_128", 1}, {"product80_128", 4}});
}

TEST_F(SymmetricTest, RunsByEachCandidate) {
  const Shape shape{1, 150, 260, true, true};
  const auto choices = candidates(Case(shape, Half::kFp16).describe(), 0);
  EXPECT_GT(choices.size(), 6U);
  expect_all(shape, choices);
}

TEST_F(SymmetricTest, WithoutInnerEntriesIsWhatIsAdded) {
  expect_all({1, 15, 0, true, false}, {{"product80_64", 1}, {"product80_128", 2}});
}

TEST_F(SymmetricTest, HasTheSameBitsInEveryOrderAloneAndInABatch) {
  const Case one({3, 71, 200, true, true}, Half::kFp16);
  for (const ProductChoice& choice : kChoices) expect_same_bits(one, choice);
}

TEST_F(SymmetricTest, AddsPartsInTheirOrder) { expect_parts_in_their_order({"product80_64", 3}); }

TEST_F(SymmetricTest, ReplaysInACapture) { expect_replays({"product80_64", 2}); }

}  // namespace
}  // namespace dmuon::kernels::cuda
