#include "dmuon/newton_schulz/elementwise.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/newton_schulz/every_backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

class ElementwiseTest : public EveryElementwise {};

INSTANTIATE_TEST_SUITE_P(All, ElementwiseTest, EveryElementwise::all(), EveryElementwise::name_of);

TEST_P(ElementwiseTest, NormaliseDividesEachMatrixByItsFrobeniusNormAndPadsWithZeros) {
  for (const at::ScalarType source : kDtypes) {
    for (const at::ScalarType dtype : kDtypes) {
      // It may work in fp32 unless the input is wider.
      const double bound =
          std::max(tolerance(dtype), source == at::kDouble ? 0 : tolerance(at::kFloat));
      for (const auto& [rows, cols] : {std::pair{1, 1}, {1, 67}, {33, 1}, {31, 129}, {64, 32}}) {
        const std::string where = std::to_string(rows) + " " + std::to_string(cols) + " " +
                                  toString(source) + " " + toString(dtype);
        const Tensor x = random({3, cols, rows}, source).mT();  // strided
        x[1].zero_();
        const Tensor got = elementwise_.normalise(x, dtype, 0);
        EXPECT_EQ(got.scalar_type(), dtype) << where;
        EXPECT_TRUE(got.is_contiguous()) << where;
        for (std::int64_t i = 0; i < 3; ++i) {
          const Tensor wide = x[i].to(at::kDouble).contiguous();
          double squares = 0;
          for (std::int64_t k = 0; k < wide.numel(); ++k) {
            squares += std::pow(wide.const_data_ptr<double>()[k], 2);
          }
          const Tensor exact = wide.div(i == 1 ? 1 : std::sqrt(squares));
          const Tensor part = got[i].narrow(0, 0, rows).narrow(1, 0, cols);
          const double error = part.to(at::kDouble).sub(exact).norm().item().toDouble();
          EXPECT_LE(error, bound) << where;
          EXPECT_EQ(got[i].count_nonzero().item().toLong(), part.count_nonzero().item().toLong())
              << where;
        }
      }
    }
  }
}

// Tensor cores want rows of 16 bytes.
TEST(AtenElementwise, PadsSidesToEightIn16Bits) {
  const auto sides = [](at::ScalarType dtype) {
    return aten_elementwise().normalise(random({2, 5, 17}, at::kFloat), dtype, 0).sizes().vec();
  };
  EXPECT_EQ(sides(at::kHalf), (std::vector<std::int64_t>{2, 8, 24}));
  EXPECT_EQ(sides(at::kBFloat16), (std::vector<std::int64_t>{2, 8, 24}));
  EXPECT_EQ(sides(at::kFloat), (std::vector<std::int64_t>{2, 5, 17}));
}

TEST_P(ElementwiseTest, NormaliseOfNoMatricesIsEmpty) {
  EXPECT_EQ(elementwise_.normalise(at::empty({0, 5, 3}), at::kHalf, 0).size(0), 0);
}

TEST_P(ElementwiseTest, NormaliseTakesEntriesOfAnySize) {
  for (const double scale : {1e-300, 1e-160, 1e-30, 1e30, 1e160, 1e300}) {
    const Tensor unit = random({1, 8, 8}, at::kDouble);
    const Tensor got =
        elementwise_.normalise(unit.mul(scale), at::kDouble, 0).narrow(1, 0, 8).narrow(2, 0, 8);
    expect_near(got, unit.div(unit.norm()), std::to_string(std::log10(scale)));
  }
  for (const double scale : {1e-30, 1e30}) {
    const Tensor unit = random({1, 8, 16}, at::kFloat);
    const Tensor got =
        elementwise_.normalise(unit.mul(scale), at::kFloat, 0).narrow(1, 0, 8).narrow(2, 0, 16);
    expect_near(got, unit.to(at::kDouble).div(unit.to(at::kDouble).norm()), std::to_string(scale));
  }
}

// Of matrices with norms above eps, below it, far below it and 0.
TEST_P(ElementwiseTest, NormaliseDividesByNoLessThanEps) {
  for (const at::ScalarType source : {at::kDouble, at::kFloat}) {
    const Tensor unit = random({4, 8, 16}, source);
    const Tensor x = unit.div(unit.norm(2, at::IntArrayRef{-2, -1}, /*keepdim=*/true));
    for (const auto& [i, norm] : {std::pair{0, 1e-6}, {1, 1e-8}, {2, 1e-30}, {3, 0.0}})
      x[i].mul_(norm);
    const Tensor got =
        elementwise_.normalise(x, at::kDouble, 1e-7).narrow(1, 0, 8).narrow(2, 0, 16);
    for (const auto& [i, norm] : {std::pair{0, 1.0}, {1, 0.1}, {2, 1e-23}, {3, 0.0}})
      EXPECT_NEAR(got[i].norm().item().toDouble(), norm, 1e-5 * norm) << source << " " << i;
  }
  const Tensor small = random({1, 8, 16}, at::kDouble).mul(1e-250);
  EXPECT_LT(elementwise_.normalise(small, at::kDouble, 1e-7).norm().item().toDouble(), 1e-240);
}

TEST_P(ElementwiseTest, NormaliseMakesWhatIsNotFiniteNanAndLeavesOtherMatricesAlone) {
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor x = random({3, 6, 8}, dtype);
    x[0][5][7].fill_(kNan);
    x[1][0][1].fill_(-std::numeric_limits<double>::infinity());
    const Tensor got = elementwise_.normalise(x, dtype, 0).narrow(1, 0, 6).narrow(2, 0, 8);
    EXPECT_TRUE(got[0][5][7].isnan().item().toBool()) << dtype;
    EXPECT_TRUE(got[1][0][1].isnan().item().toBool()) << dtype;
    EXPECT_FALSE(got.narrow(0, 0, 2).isinf().any().item().toBool()) << dtype;
    EXPECT_TRUE(got[2].isfinite().all().item().toBool()) << dtype;
  }
}

// fp32 [2, 6, n] and, of the same values, blocks of its columns: [2, 3, 6, n / 3], which do not
// follow each other in memory.
std::vector<Tensor> laid_out_two_ways(std::int64_t cols) {
  const Tensor closed = random({2, 6, cols}, at::kFloat);
  return {closed, closed.clone().view({2, 6, 3, cols / 3}).transpose(1, 2)};
}

TEST_P(ElementwiseTest, TakesMomentumAndItsDirection) {
  for (const std::int64_t cols : {3, 51, 4098}) {
    for (const Tensor& layout : laid_out_two_ways(cols)) {
      for (const double mu : {0.0, 0.3, 0.95}) {
        for (const bool nesterov : {false, true}) {
          const Tensor momentum = at::empty_like(layout).copy_(layout);
          const Tensor gradient = random(layout.sizes(), at::kFloat);
          const Tensor expected = layout.to(at::kDouble).mul(mu).add(gradient, 1 - mu);
          const Tensor direction =
              elementwise_.move_momentum({momentum, gradient, mu, nesterov, kTrue});
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
TEST_P(ElementwiseTest, StartsFromTheNormalisedDirection) {
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
                elementwise_.start({momentum, gradient, 0.9, nesterov, kTrue}, dtype, eps);
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
TEST_P(ElementwiseTest, StartsFromNanWhereAGradientIsNotFinite) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const double wrong : {kNan, std::numeric_limits<double>::infinity()}) {
      const Tensor momentum = random({2, 6, 40}, at::kFloat);
      const Tensor gradient = random({2, 6, 40}, at::kFloat);
      gradient[0][3][17].fill_(wrong);
      const Tensor one = momentum[0].clone();
      const Start alone = elementwise_.start({one, gradient[0], 0.9, true, kTrue}, dtype, 1e-7);
      const Start both = elementwise_.start({momentum, gradient, 0.9, true, kTrue}, dtype, 1e-7);
      EXPECT_TRUE(alone.x.mul(alone.scale)[3][17].isnan().item().toBool()) << dtype;
      EXPECT_TRUE(both.x[0][3][17].isnan().item().toBool()) << dtype;
      EXPECT_TRUE(both.x[1].isfinite().all().item().toBool()) << dtype;
      EXPECT_FALSE(one[3][17].isfinite().item().toBool()) << dtype;
    }
  }
}

TEST_P(ElementwiseTest, StartsFromTheMomentumWhereAStepDoesNotApply) {
  const Tensor momentum = random({5, 7}, at::kFloat);
  const Tensor before = momentum.clone();
  const Tensor gradient = filled({5, 7}, kNan, at::kFloat);
  const Start start = elementwise_.start({momentum, gradient, 0.9, true, kFalse}, at::kFloat, 0);
  EXPECT_TRUE(momentum.equal(before));
  expect_near(start.x.mul(start.scale).narrow(0, 0, 5).narrow(1, 0, 7),
              before.to(at::kDouble).div(before.to(at::kDouble).norm()), "fp32");
}

// Also where products of entries leave fp32, and where the step does not apply.
TEST_P(ElementwiseTest, TakesAFactorWithTheBitsOfAGradientThatHasIt) {
  const Tensor factor = filled({}, 0.3, at::kFloat);
  for (const double size : {1.0, 1e-20, 1e20}) {
    for (const Tensor& layout : laid_out_two_ways(3300)) {
      const Tensor before = (layout.dim() == 3 ? layout[1] : layout).mul(size);
      const Tensor gradient = random(before.sizes(), at::kFloat).mul(size);
      const Tensor kept = gradient.clone();
      const Tensor scaled = gradient.mul(0.3F);
      for (const bool nesterov : {false, true}) {
        for (const Tensor& applies : {kTrue, kFalse}) {
          const auto moved = [&](const Tensor& from, const Tensor& by) {
            const Tensor momentum = before.clone();
            const Tensor direction =
                elementwise_.move_momentum({momentum, from, 0.9, nesterov, applies, {}, by});
            return std::pair{momentum, direction};
          };
          EXPECT_TRUE(moved(gradient, factor).first.equal(moved(scaled, {}).first));
          EXPECT_TRUE(moved(gradient, factor).second.equal(moved(scaled, {}).second));
          for (const at::ScalarType dtype : kDtypes) {
            const auto started = [&](const Tensor& from, const Tensor& by) {
              const Tensor momentum = before.clone();
              const Start start =
                  elementwise_.start({momentum, from, 0.9, nesterov, applies, {}, by}, dtype, 1e-7);
              return std::tuple{momentum, start.x, start.scale};
            };
            const auto& [momentum, x, scale] = started(gradient, factor);
            const auto& [momentum2, x2, scale2] = started(scaled, {});
            EXPECT_TRUE(momentum.equal(momentum2) && x.equal(x2)) << dtype << " " << size;
            EXPECT_EQ(scale, scale2) << dtype << " " << size;
          }
        }
      }
      EXPECT_TRUE(gradient.equal(kept));
    }
  }
}

TEST_P(ElementwiseTest, MovesWeightsByADirectionOfAnyDtype) {
  for (const std::int64_t cols : {3, 51, 4098}) {
    for (const Tensor& layout : laid_out_two_ways(cols)) {
      for (const at::ScalarType dtype : kDtypes) {
        const Tensor direction = random(layout.sizes(), dtype);
        for (const double decay : {1.0, 0.9}) {
          const Tensor expected = layout.to(at::kDouble).mul(decay).sub(direction, 0.25);
          const Tensor master = at::empty_like(layout).copy_(layout);
          elementwise_.move_weights({master, decay, direction, -0.25, kTrue});
          expect_near(master, expected, toString(dtype));
        }
      }
    }
  }
}

TEST_P(ElementwiseTest, LeavesMomentumAndWeightsAloneWhereAStepDoesNotApply) {
  const Tensor before = random({2, 5, 7}, at::kFloat);
  for (const bool nesterov : {false, true}) {
    const Tensor momentum = before.clone();
    const Tensor gradient = filled({2, 5, 7}, kNan, at::kFloat);
    const Tensor direction =
        elementwise_.move_momentum({momentum, gradient, 0.9, nesterov, kFalse});
    EXPECT_TRUE(momentum.equal(before));
    EXPECT_TRUE(direction.equal(before));
  }
  const Tensor master = before.clone();
  elementwise_.move_weights({master, 0.5, random({2, 5, 7}, at::kBFloat16), -0.1, kFalse});
  EXPECT_TRUE(master.equal(before));
}

// By plain loops, which the compiler leaves alone here: no instruction set and no thread shows.
TEST(CpuElementwise, HasTheBitsOfPlainLoopsWhateverTheMachineAndTheNumberOfThreads) {
  const int before = at::get_num_threads();
  const Tensor start = random({3, 400, 301}, at::kFloat);
  const Tensor gradient = random({3, 400, 301}, at::kFloat);
  constexpr float kRest = 1 - 0.9;
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    const Tensor momentum = start.clone();
    const Tensor direction =
        cpu_elementwise().move_momentum({momentum, gradient, 0.9, true, kTrue});
    const Tensor master = start.clone();
    cpu_elementwise().move_weights({master, 0.9, gradient, -0.1, kTrue});
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

TEST_P(ElementwiseTest, KeepsNothingOfTheOldMomentumWithoutMomentum) {
  const Tensor momentum = filled({1, 3, 5}, 1e8, at::kFloat);
  const Tensor gradient = random({1, 3, 5}, at::kFloat);
  const Tensor direction = elementwise_.move_momentum({momentum, gradient, 0, true, kTrue});
  EXPECT_TRUE(momentum.equal(gradient));
  EXPECT_TRUE(direction.equal(gradient));
}

TEST(ElementwiseOf, IsTheCpusForCpusAndAtensForTheRest) {
  EXPECT_EQ(&elementwise_of(c10::Device(c10::kCPU)), &cpu_elementwise());
  EXPECT_EQ(&elementwise_of(c10::Device(c10::kCUDA, 1)), &aten_elementwise());
  EXPECT_EQ(&elementwise_of(c10::Device(c10::kXPU)), &aten_elementwise());
}

}  // namespace
}  // namespace dmuon::newton_schulz
