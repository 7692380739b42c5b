#include "dmuon/newton_schulz/iteration.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "dmuon/newton_schulz/orthogonalize.h"
#include "tests/newton_schulz/every_backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

class IterationTest : public EveryBackend {
 protected:
  Tensor iterated(const Tensor& x, double scale, int num_steps, const flops::Segments& segments) {
    const Steps steps{resolve("quintic", num_steps), segments, at::kFloat, 0};
    return computed(backend_, iterate(backend_, {x.clone(), scale}, steps));
  }
};

INSTANTIATE_TEST_SUITE_P(All, IterationTest, EveryBackend::all(), EveryBackend::name_of);

// By the definition, in fp64: X <- a X + (b R + c R^2) X.
Tensor plain(const Tensor& start, int num_steps) {
  Tensor x = start.to(at::kDouble);
  for (const auto& [a, b, c] : resolve("quintic", num_steps)) {
    const Tensor r = x.matmul(x.mT());
    x = x.mul(a).add(r.mul(b).add(r.matmul(r), c).matmul(x));
  }
  return x;
}

TEST_P(IterationTest, FollowsTheDefinitionInSegmentsOfAnyLength) {
  for (const auto& [rows, cols] : {std::pair{16, 48}, {48, 16}, {32, 32}}) {
    const Tensor given = random({rows, cols}, at::kFloat);
    const Tensor x = given.div(given.norm());
    for (const flops::Segments& segments :
         {flops::Segments{1}, {1, 1, 1}, {2}, {3}, {3, 2}, {2, 1, 2}, {5}}) {
      int num_steps = 0;
      for (const int length : segments) num_steps += length;
      const Tensor exact = plain(x, num_steps);
      const Tensor got = iterated(x, 1, num_steps, segments);
      EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item().toDouble(),
                2e-4 * exact.norm().item().toDouble())
          << rows << " " << cols << " " << num_steps;
    }
  }
}

// A power of two, which no rounding sees.
TEST_P(IterationTest, TakesAScaleForADividedMatrix) {
  const Tensor x = random({2, 16, 48}, at::kFloat).mul(0.03125);
  for (const flops::Segments& segments : {flops::Segments{1}, {1, 1}, {2}, {3, 2}}) {
    int num_steps = 0;
    for (const int length : segments) num_steps += length;
    EXPECT_TRUE(iterated(x.mul(64), 1.0 / 64, num_steps, segments)
                    .equal(iterated(x, 1, num_steps, segments)))
        << num_steps;
  }
}

// In bf16, whose direct form is off by 1e-2. In a batch, and either side the shorter.
TEST(Iteration, WithWideSquaresFollowsTheDefinition) {
  const Backend& backend = avx512_backend();
  if (!backend.has_wide_squares(at::kBFloat16))
    GTEST_SKIP() << "this machine lacks the instructions";
  for (const auto& [rows, cols] : {std::pair{48, 96}, {96, 48}, {33, 99}}) {
    const Tensor given = random({2, rows, cols}, at::kFloat);
    const Tensor x = given.div(given.norm(2, at::IntArrayRef{-2, -1}, /*keepdim=*/true));
    for (const flops::Segments& segments : {flops::Segments{1}, {1, 1}, {2}, {2, 1}, {3, 2}, {4}}) {
      int num_steps = 0;
      for (const int length : segments) num_steps += length;
      const Steps steps{resolve("quintic", num_steps), segments, std::nullopt, 0};
      const auto iterated = [&](const Tensor& some, double scale) {
        return computed(backend, iterate(backend, {some.clone(), scale}, steps));
      };
      const Tensor narrow = x.to(at::kBFloat16);
      const Tensor got = iterated(narrow, 1);
      const Tensor exact = plain(narrow, num_steps);
      EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item().toDouble(),
                8e-3 * exact.norm().item().toDouble())
          << rows << " " << cols << " " << num_steps;
      EXPECT_TRUE(iterated(narrow[1], 1).equal(got[1])) << num_steps;
      EXPECT_TRUE(iterated(narrow.mul(64), 1.0 / 64).equal(got)) << num_steps;
    }
  }
}

}  // namespace
}  // namespace dmuon::newton_schulz
