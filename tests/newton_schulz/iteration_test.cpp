#include "dmuon/newton_schulz/iteration.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace dmuon::newton_schulz
