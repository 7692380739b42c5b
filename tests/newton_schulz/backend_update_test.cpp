// What a backend does with momentum and weights, before the iteration and after it.

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "dmuon/newton_schulz/backend.h"
#include "tests/newton_schulz/every_backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

class UpdateTest : public EveryBackend {};

INSTANTIATE_TEST_SUITE_P(All, UpdateTest, EveryBackend::all(), EveryBackend::name_of);

// What of an update these look at; nothing of the rest.
Update momentum_of(const Tensor& momentum, const Tensor& gradient, double mu, bool nesterov,
                   const Tensor& applies = kTrue) {
  return {.master = momentum,
          .momentum = momentum,
          .gradient = gradient,
          .mu = mu,
          .nesterov = nesterov,
          .decay = kNan,
          .lr = kNan,
          .applies = applies};
}

Update weights_of(const Tensor& master, double decay, double lr, const Tensor& applies = kTrue) {
  return {.master = master,
          .momentum = {},
          .gradient = {},
          .mu = kNan,
          .nesterov = false,
          .decay = decay,
          .lr = lr,
          .applies = applies};
}

// fp32 [2, 6, n] and, of the same values, blocks of its columns: [2, 3, 6, n / 3], which do not
// follow each other in memory.
std::vector<Tensor> laid_out_two_ways(std::int64_t cols) {
  const Tensor closed = random({2, 6, cols}, at::kFloat);
  return {closed, closed.clone().view({2, 6, 3, cols / 3}).transpose(1, 2)};
}

TEST_P(UpdateTest, TakesMomentumAndItsDirection) {
  for (const std::int64_t cols : {3, 51, 4098}) {
    for (const Tensor& layout : laid_out_two_ways(cols)) {
      for (const double mu : {0.0, 0.3, 0.95}) {
        for (const bool nesterov : {false, true}) {
          const Tensor momentum = at::empty_like(layout).copy_(layout);
          const Tensor gradient = random(layout.sizes(), at::kFloat);
          const Tensor expected = layout.to(at::kDouble).mul(mu).add(gradient, 1 - mu);
          const Tensor direction =
              backend_.take_momentum(momentum_of(momentum, gradient, mu, nesterov));
          expect_near(momentum, expected, "momentum");
          expect_near(direction, nesterov ? expected.mul(mu).add(gradient, 1 - mu) : expected,
                      "direction");
        }
      }
    }
  }
}

// One matrix and a batch, also in blocks of columns; directions whose products of entries leave
// fp32 and some that eps stands above; rows longer than what is taken at once.
TEST_P(UpdateTest, StartsFromTheNormalisedDirection) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const double size : {1.0, 1e-9, 1e-11, 1e-20, 1e20, 0.0}) {
      for (const double eps : {0.0, 1e-7}) {
        for (const bool nesterov : {false, true}) {
          for (const Tensor& layout : laid_out_two_ways(3300)) {
            const bool is_one = layout.dim() == 3;
            const Tensor before = (is_one ? layout[1] : layout).mul(size);
            const Tensor momentum = before.clone();
            const Tensor gradient = random(before.sizes(), at::kFloat).mul(size);
            const Start start =
                backend_.start(momentum_of(momentum, gradient, 0.9, nesterov), dtype, eps);
            const Tensor moved = before.to(at::kDouble).mul(0.9).add(gradient, 0.1);
            const Tensor direction = nesterov ? moved.mul(0.9).add(gradient, 0.1) : moved;
            const Tensor norm = direction.norm(2, at::IntArrayRef{-2, -1}, /*keepdim=*/true);
            const Tensor expected = direction.div(norm.clamp_min(std::max(eps, 1e-300)));
            const std::string where =
                std::string(toString(dtype)) + " " + std::to_string(std::log10(size));
            if (size > 0) expect_near(momentum.div(size), moved.div(size), where);
            EXPECT_EQ(start.x.scalar_type(), dtype);
            EXPECT_EQ(start.x.dim(), is_one ? 2 : 3);
            const Tensor x = start.x.to(at::kDouble).mul(start.scale);
            const Tensor part = x.narrow(-2, 0, 6).narrow(-1, 0, before.size(-1));
            // The direction itself is in fp32; what eps leaves of the smallest, fp16 does not hold.
            const double allowed = std::max(tolerance(dtype), tolerance(at::kFloat)) *
                                       expected.norm().item().toDouble() +
                                   (dtype == at::kHalf ? 1e-9 : 0);
            const double off = part.sub(expected.reshape(part.sizes())).norm().item().toDouble();
            EXPECT_LE(off, allowed) << where;
            EXPECT_EQ(x.count_nonzero().item().toLong(), part.count_nonzero().item().toLong());
            // Products of entries stay in fp32.
            const double largest = start.x.to(at::kDouble).norm().item().toDouble();
            EXPECT_TRUE(largest == 0 || (1e-17 < largest && largest < 1e17)) << where;
          }
        }
      }
    }
  }
}

// Of one matrix and of one in a batch: the others are as they are without it.
TEST_P(UpdateTest, StartsFromNanWhereAGradientIsNotFinite) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const double wrong : {kNan, std::numeric_limits<double>::infinity()}) {
      const Tensor momentum = random({2, 6, 40}, at::kFloat);
      const Tensor gradient = random({2, 6, 40}, at::kFloat);
      gradient[0][3][17].fill_(wrong);
      const Tensor one = momentum[0].clone();
      const Start alone = backend_.start(momentum_of(one, gradient[0], 0.9, true), dtype, 1e-7);
      const Start both = backend_.start(momentum_of(momentum, gradient, 0.9, true), dtype, 1e-7);
      EXPECT_TRUE(alone.x.mul(alone.scale)[3][17].isnan().item().toBool()) << dtype;
      EXPECT_TRUE(both.x[0][3][17].isnan().item().toBool()) << dtype;
      EXPECT_TRUE(both.x[1].isfinite().all().item().toBool()) << dtype;
      EXPECT_FALSE(one[3][17].isfinite().item().toBool()) << dtype;
    }
  }
}

TEST_P(UpdateTest, StartsFromTheMomentumWhereAStepDoesNotApply) {
  const Tensor momentum = random({5, 7}, at::kFloat);
  const Tensor before = momentum.clone();
  const Tensor gradient = filled({5, 7}, kNan, at::kFloat);
  const Start start =
      backend_.start(momentum_of(momentum, gradient, 0.9, true, kFalse), at::kFloat, 0);
  EXPECT_TRUE(momentum.equal(before));
  expect_near(start.x.mul(start.scale).narrow(0, 0, 5).narrow(1, 0, 7),
              before.to(at::kDouble).div(before.to(at::kDouble).norm()), "fp32");
}

// [9, 14] of a product with 16 rows and columns; one matrix, a batch and blocks of columns; where
// the backend has them, with factors of the addend's columns or rows.
TEST_P(UpdateTest, FinishesWithTheLastProduct) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const std::int64_t num_blocks : {0, 1, 2}) {
      const Tensor all = random({2, 9, 14 * std::max<std::int64_t>(1, num_blocks)}, at::kFloat);
      const Tensor layout = num_blocks == 0   ? all[0]
                            : num_blocks == 1 ? all
                                              : all.view({2, 9, 2, 14}).transpose(1, 2);
      std::vector<std::int64_t> leading;
      if (num_blocks > 0) leading.push_back(2 * num_blocks);
      const auto operand = [&](std::int64_t rows, std::int64_t cols) {
        auto sizes = leading;
        sizes.insert(sizes.end(), {rows, cols});
        return random(sizes, dtype);
      };
      PendingProduct product{0.5, operand(16, 16), 0.25, operand(16, 32), operand(32, 16)};
      const auto wide = [](const Tensor& x) { return x.to(at::kDouble); };
      std::vector<Tensor> all_factors{Tensor()};
      if (backend_.has_wide_squares(dtype)) {
        all_factors.push_back(operand(1, 16).to(at::kFloat));
        all_factors.push_back(operand(16, 1).to(at::kFloat));
      }
      for (const Tensor& factors : all_factors) {
        product.factors = factors;
        const Tensor c = factors.defined() ? wide(product.c).mul(factors) : wide(product.c);
        const Tensor direction = c.mul(product.beta)
                                     .add(wide(product.a).matmul(wide(product.b)), product.alpha)
                                     .narrow(-2, 0, 9)
                                     .narrow(-1, 0, 14)
                                     .reshape(layout.sizes());
        for (const bool applies : {true, false}) {
          const Tensor master = layout.clone();
          const Tensor expected =
              applies ? wide(master).mul(0.9).sub(direction, 0.125) : wide(master);
          backend_.finish(weights_of(master, 0.9, 0.125, applies ? kTrue : kFalse), product);
          const double off = wide(master).sub(expected).norm().item().toDouble();
          const double allowed =
              0.125 * tolerance(dtype) * direction.norm().item().toDouble() + tolerance(at::kFloat);
          EXPECT_LE(off, applies ? allowed : 0) << dtype << " " << num_blocks;
        }
      }
    }
  }
}

TEST_P(UpdateTest, MovesWeightsByADirectionOfAnyDtype) {
  for (const std::int64_t cols : {3, 51, 4098}) {
    for (const Tensor& layout : laid_out_two_ways(cols)) {
      for (const at::ScalarType dtype : kDtypes) {
        const Tensor direction = random(layout.sizes(), dtype);
        for (const double decay : {1.0, 0.9}) {
          const Tensor expected = layout.to(at::kDouble).mul(decay).sub(direction, 0.25);
          const Tensor master = at::empty_like(layout).copy_(layout);
          backend_.move_weights(weights_of(master, decay, 0.25), direction);
          expect_near(master, expected, toString(dtype));
        }
      }
    }
  }
}

TEST_P(UpdateTest, LeavesMomentumAndWeightsAloneWhereAStepDoesNotApply) {
  const Tensor before = random({2, 5, 7}, at::kFloat);
  for (const bool nesterov : {false, true}) {
    const Tensor momentum = before.clone();
    const Tensor gradient = filled({2, 5, 7}, kNan, at::kFloat);
    const Tensor direction =
        backend_.take_momentum(momentum_of(momentum, gradient, 0.9, nesterov, kFalse));
    EXPECT_TRUE(momentum.equal(before));
    EXPECT_TRUE(direction.equal(before));
  }
  const Tensor master = before.clone();
  backend_.move_weights(weights_of(master, 0.5, 0.1, kFalse), random({2, 5, 7}, at::kBFloat16));
  EXPECT_TRUE(master.equal(before));
}

// By plain loops, which the compiler leaves alone here: no instruction set and no thread shows.
TEST(UpdateOfCpus, HasTheBitsOfPlainLoopsWhateverTheMachineAndTheNumberOfThreads) {
  const int before = at::get_num_threads();
  const Tensor start = random({3, 400, 301}, at::kFloat);
  const Tensor gradient = random({3, 400, 301}, at::kFloat);
  constexpr float kRest = 1 - 0.9;
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    const Tensor momentum = start.clone();
    const Tensor direction =
        cpu_backend().take_momentum(momentum_of(momentum, gradient, 0.9, true));
    const Tensor master = start.clone();
    cpu_backend().move_weights(weights_of(master, 0.9, 0.1), gradient);
    std::int64_t off = 0;
    for (std::int64_t i = 0; i < start.numel(); ++i) {
      const float m = start.const_data_ptr<float>()[i];
      const float g = gradient.const_data_ptr<float>()[i];
      volatile float step = kRest * (g - m);
      volatile float moved = m + step;
      volatile float back = kRest * (moved - g);
      volatile float kept = 0.9F * m;
      volatile float change = 0.1F * g;
      off += momentum.const_data_ptr<float>()[i] != moved;
      off += direction.const_data_ptr<float>()[i] != moved - back;
      off += master.const_data_ptr<float>()[i] != kept - change;
    }
    EXPECT_EQ(off, 0) << threads;
  }
  at::set_num_threads(before);
}

TEST_P(UpdateTest, KeepsNothingOfTheOldMomentumWithoutMomentum) {
  const Tensor momentum = filled({1, 3, 5}, 1e8, at::kFloat);
  const Tensor gradient = random({1, 3, 5}, at::kFloat);
  const Tensor direction = backend_.take_momentum(momentum_of(momentum, gradient, 0, true));
  EXPECT_TRUE(momentum.equal(gradient));
  EXPECT_TRUE(direction.equal(gradient));
}

}  // namespace
}  // namespace dmuon::newton_schulz
