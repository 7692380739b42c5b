#include "dmuon/newton_schulz/method.h"

#include <ATen/ops/cat.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "dmuon/core/error.h"
#include "tests/newton_schulz/every_backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

// At most three matrices at once.
class ThreeAtOnce final : public PlainProducts {
 public:
  std::int64_t at_once(std::int64_t, std::int64_t, std::int64_t, at::ScalarType) const override {
    return 3;
  }
};

Method method(bool batched) {
  static const ThreeAtOnce kProducts;
  return {4, 5, kProducts, cpu_elementwise(), batched, {}, at::kFloat, 0};
}

TEST(Pieces, OfABatchHaveAsManyMatricesAsGoTogether) {
  const Tensor batch = random({7, 4, 5}, at::kFloat);
  const std::vector<Tensor> pieces = method(true).pieces_of(batch);
  ASSERT_EQ(pieces.size(), 3);
  EXPECT_EQ(pieces[0].sizes(), (at::IntArrayRef{3, 4, 5}));
  EXPECT_EQ(pieces[2].sizes(), (at::IntArrayRef{1, 4, 5}));
  EXPECT_TRUE(at::cat(pieces).equal(batch));
  pieces[1][0].zero_();  // a view
  EXPECT_EQ(batch[3].count_nonzero().item().toLong(), 0);
}

TEST(Pieces, OfBlocksOfColumnsHaveAllBlocksOfTheirMatrices) {
  const Tensor blocks = random({5, 4, 10}, at::kFloat).view({5, 4, 2, 5}).transpose(1, 2);
  const std::vector<Tensor> pieces = method(true).pieces_of(blocks);
  ASSERT_EQ(pieces.size(), 5);  // two matrices each, of which a second pair would make four
  for (std::int64_t i = 0; i < 5; ++i)
    EXPECT_TRUE(pieces[static_cast<std::size_t>(i)][0].equal(blocks[i]));
}

TEST(Pieces, OneByOneAreTheMatricesThemselves) {
  const Tensor blocks = random({2, 4, 10}, at::kFloat).view({2, 4, 2, 5}).transpose(1, 2);
  const std::vector<Tensor> pieces = method(false).pieces_of(blocks);
  ASSERT_EQ(pieces.size(), 4);
  for (std::int64_t i = 0; i < 4; ++i) {
    const Tensor& piece = pieces[static_cast<std::size_t>(i)];
    EXPECT_TRUE(piece.equal(blocks[i / 2][i % 2]));
    EXPECT_EQ(piece.storage().data(), blocks.storage().data());
  }
}

TEST(Pieces, OfAStateAreThoseOfItsMatrices) {
  const Tensor state = random({7, 4, 1}, at::kFloat);
  const std::vector<Tensor> pieces = method(true).pieces_of(state);
  ASSERT_EQ(pieces.size(), 3);
  EXPECT_TRUE(pieces[1].equal(state.narrow(0, 3, 3)));
  EXPECT_EQ(method(false).pieces_of(state).size(), 7);
}

TEST(Pieces, OfOneMatrixIsItselfAndOfNothingNone) {
  const Tensor one = random({4, 5}, at::kFloat);
  EXPECT_TRUE(method(true).pieces_of(one).at(0).equal(one.unsqueeze(0)));
  EXPECT_TRUE(method(false).pieces_of(one).at(0).equal(one));
  for (const bool batched : {true, false})
    EXPECT_TRUE(method(batched).pieces_of(random({0, 4, 5}, at::kFloat)).empty());
}

TEST(MethodFor, FindsWhatAChoiceNames) {
  IterationOptions options;
  options.coefficients = resolve("quintic", 5);
  options.choice = Choice{"cpu", Form::kGram, true, 0};
  const Method found = method_for(8, 16, c10::kCPU, options, "f");
  EXPECT_EQ(&found.products, &cpu_products());
  EXPECT_TRUE(found.batched);
  EXPECT_EQ(found.steps.segments, (flops::Segments{2, 3}));
  EXPECT_EQ(found.steps.square_dtype, at::kFloat);
  EXPECT_EQ(found.eps, 1e-7);
  EXPECT_FALSE(found.steps.symmetric_mixed);
  options.choice->backend = "another";
  try {
    method_for(8, 16, c10::kCPU, options, "f");
    ADD_FAILURE() << "accepted";
  } catch (const core::InvalidArgument& error) {
    const std::string message = error.what();
    EXPECT_TRUE(message.starts_with("f: choice.backend must be one of ")) << message;
  }
}

// fp16 has no WideSquares: R, Z and Q are in fp16, and all their products are symmetric.
TEST(MethodFor, RunsSegmentsInFp16BySymmetricProducts) {
  IterationOptions options;
  options.coefficients = resolve("polar_express", 5);
  options.dtype = at::kHalf;
  options.choice = Choice{"cpu", Form::kSegmented, false, 128};
  const Method found = method_for(300, 700, c10::kCPU, options, "f");
  EXPECT_EQ(found.steps.segments, (flops::Segments{2, 1, 2}));
  EXPECT_EQ(found.steps.square_dtype, at::kHalf);
  EXPECT_TRUE(found.steps.symmetric_mixed);
  EXPECT_EQ(found.steps.panel_rows, 128);
}

}  // namespace
}  // namespace dmuon::newton_schulz
