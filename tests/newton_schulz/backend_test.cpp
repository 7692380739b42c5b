#include "dmuon/newton_schulz/backend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "dmuon/kernels/products.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};
const Tensor kTrue = at::scalar_tensor(true, at::kBool);
const Tensor kFalse = at::scalar_tensor(false, at::kBool);
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Unit roundoff times a margin for the sum's length.
double tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-14;
    case at::kFloat:
      return 2e-6;
    case at::kBFloat16:
      return 4e-3;
    default:
      return 5e-4;
  }
}

Tensor random(at::IntArrayRef sizes, at::ScalarType dtype) {
  // The default generator has another seed in every process: now and then a sum of one element
  // nearly vanishes.
  static const at::Generator generator = at::detail::createCPUGenerator(0);
  return at::randn(sizes, generator, at::kDouble).to(dtype);
}

Tensor filled(at::IntArrayRef sizes, double value, at::ScalarType dtype) {
  return at::full(sizes, value, at::TensorOptions(dtype));
}

// beta c + alpha a b of two matrices, entry by entry in fp64.
Tensor plain_product(double beta, const Tensor& c, double alpha, const Tensor& a, const Tensor& b) {
  const Tensor out = c.to(at::kDouble).mul(beta);
  const Tensor left = a.to(at::kDouble).contiguous();
  const Tensor right = b.to(at::kDouble).mT().contiguous();
  const std::int64_t inner = a.size(1);
  for (std::int64_t row = 0; row < out.size(0); ++row) {
    for (std::int64_t col = 0; col < out.size(1); ++col) {
      const double* x = left.const_data_ptr<double>() + row * inner;
      const double* y = right.const_data_ptr<double>() + col * inner;
      double sum = 0;
      for (std::int64_t k = 0; k < inner; ++k) sum += x[k] * y[k];
      out.mutable_data_ptr<double>()[row * out.size(1) + col] += alpha * sum;
    }
  }
  return out;
}

Tensor mirrored(const Tensor& square) { return square.tril().add(square.tril(-1).mT()); }

void expect_near(const Tensor& got, const Tensor& exact, const std::string& where) {
  ASSERT_EQ(got.sizes(), exact.sizes()) << where;
  const double error = got.to(at::kDouble).sub(exact).norm().item().toDouble();
  EXPECT_LE(error, tolerance(got.scalar_type()) * exact.norm().item().toDouble()) << where;
}

struct Case {
  const char* name;
  const Backend& (*backend)();
};

// Every backend, on CPU tensors.
class BackendTest : public testing::TestWithParam<Case> {
 protected:
  const Backend& backend_ = GetParam().backend();
};

INSTANTIATE_TEST_SUITE_P(All, BackendTest,
                         testing::Values(Case{"cpu", cpu_backend}, Case{"avx512", avx512_backend},
                                         Case{"aten", aten_backend}),
                         [](const auto& param) { return std::string(param.param.name); });

TEST_P(BackendTest, ProductAgreesWithFp64AtOddAndEmptySizes) {
  const std::int64_t sizes[][3] = {{1, 1, 1},     {7, 13, 5}, {67, 1, 31}, {1, 67, 129},
                                   {96, 64, 128}, {5, 3, 0},  {0, 4, 3},   {4, 0, 3}};
  for (const at::ScalarType dtype : kDtypes) {
    for (const auto& [rows, cols, inner] : sizes) {
      const std::string where = std::to_string(rows) + " " + std::to_string(cols) + " " +
                                std::to_string(inner) + " " + toString(dtype);
      const Tensor a = random({rows, inner}, dtype);
      const Tensor b = random({cols, inner}, dtype).mT();
      const Tensor c = random({rows, cols}, dtype);
      const Tensor out = filled({rows, cols}, kNan, dtype);
      backend_.product(out, 0.5, c, 0.25, a, b);
      expect_near(out, plain_product(0.5, c, 0.25, a, b), where);

      // Without an addend, which may then hold anything; into a slice; in place.
      backend_.product(out, 0, filled({rows, cols}, kNan, dtype), 1, a, b);
      const Tensor exact = plain_product(0, c, 1, a, b);
      expect_near(out, exact, where);
      const Tensor wide = filled({rows, cols + 3}, 7, dtype);
      backend_.product(wide.narrow(1, 1, cols), 0, wide, 1, a, b);
      expect_near(wide.narrow(1, 1, cols), exact, where);
      EXPECT_TRUE(wide.select(1, 0)
                      .eq(7)
                      .logical_and(wide.select(1, cols + 1).eq(7))
                      .all()
                      .item()
                      .toBool());
      out.copy_(c);
      backend_.product(out, -1, out, 1, a, b);
      expect_near(out, plain_product(-1, c, 1, a, b), where);
    }
  }
}

TEST_P(BackendTest, ProductOfABatchIsThatOfEachMatrix) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const std::int64_t num_batch : {0, 1, 3}) {
      const Tensor a = random({num_batch, 9, 17}, dtype);
      const Tensor b = random({num_batch, 17, 11}, dtype);
      const Tensor c = random({num_batch, 9, 11}, dtype);
      const Tensor out = filled({num_batch, 9, 11}, kNan, dtype);
      backend_.product(out, 2, c, -0.5, a, b);
      for (std::int64_t i = 0; i < num_batch; ++i) {
        expect_near(out[i], plain_product(2, c[i], -0.5, a[i], b[i]), toString(dtype));
      }
    }
  }
}

// Sizes below, at and above those that the CPU divides into panels, and primes.
TEST_P(BackendTest, SymmetricProductAgreesWithFp64) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const std::int64_t m : {0, 1, 7, 255, 256, 257, 389}) {
      for (const std::int64_t n : {0, 1, 131}) {
        const std::string where =
            std::to_string(m) + " " + std::to_string(n) + " " + toString(dtype);
        const double scale = 1 / std::sqrt(static_cast<double>(m + n + 1));
        const Tensor x = random({m, n}, at::kDouble).mul(scale).to(dtype);
        for (const std::int64_t panel_rows : {0, 1, 100, 128}) {
          const Tensor r = filled({m, m}, kNan, dtype);
          backend_.symmetric_product(r, 0, r, 1, x, x.mT(), panel_rows);
          expect_near(r, plain_product(0, at::zeros({m, m}), 1, x, x.mT()), where);

          if (n != 131) continue;
          const Tensor z = filled({m, m}, kNan, dtype);
          backend_.symmetric_product(z, 0.5, r, 0.25, r, r, panel_rows);
          expect_near(z, plain_product(0.5, r, 0.25, r, r), where);
          backend_.symmetric_product(r, 0.5, r, 0.25, x, x.mT(), panel_rows);  // c is out
          expect_near(r, plain_product(0, at::zeros({m, m}), 0.75, x, x.mT()), where);
        }
      }
    }
  }
}

TEST(CpuBackend, MirrorsTheLowerTriangleOfASymmetricProduct) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const std::int64_t m : {1, 2, 31, 32, 33, 97, 300}) {
      // Not symmetric, so that it is seen which triangle is kept.
      const Tensor a = random({2, m, 5}, dtype);
      const Tensor b = random({2, 5, m}, dtype);
      const Tensor out = filled({2, m, m}, kNan, dtype);
      cpu_backend().symmetric_product(out, 0, out, 1, a, b, 128);
      for (std::int64_t i = 0; i < 2; ++i) {
        const Tensor full = plain_product(0, at::zeros({m, m}), 1, a[i], b[i]);
        EXPECT_TRUE(at::equal(out[i], out[i].mT())) << m;
        expect_near(out[i], mirrored(full), std::to_string(m));
      }
    }
  }
}

TEST_P(BackendTest, NormaliseDividesEachMatrixByItsFrobeniusNormAndPadsWithZeros) {
  for (const at::ScalarType source : kDtypes) {
    for (const at::ScalarType dtype : kDtypes) {
      // A backend may work in fp32 unless the input is wider.
      const double bound =
          std::max(tolerance(dtype), source == at::kDouble ? 0 : tolerance(at::kFloat));
      for (const auto& [rows, cols] : {std::pair{1, 1}, {1, 67}, {33, 1}, {31, 129}, {64, 32}}) {
        const std::string where = std::to_string(rows) + " " + std::to_string(cols) + " " +
                                  toString(source) + " " + toString(dtype);
        const Tensor x = random({3, cols, rows}, source).mT();  // strided
        x[1].zero_();
        const Tensor got = backend_.normalise(x, dtype, 0);
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

TEST_P(BackendTest, NormaliseOfNoMatricesIsEmpty) {
  EXPECT_EQ(backend_.normalise(at::empty({0, 5, 3}), at::kHalf, 0).size(0), 0);
}

TEST_P(BackendTest, NormaliseTakesEntriesOfAnySize) {
  for (const double scale : {1e-300, 1e-160, 1e-30, 1e30, 1e160, 1e300}) {
    const Tensor unit = random({1, 8, 8}, at::kDouble);
    const Tensor got =
        backend_.normalise(unit.mul(scale), at::kDouble, 0).narrow(1, 0, 8).narrow(2, 0, 8);
    expect_near(got, unit.div(unit.norm()), std::to_string(std::log10(scale)));
  }
  for (const double scale : {1e-30, 1e30}) {
    const Tensor unit = random({1, 8, 16}, at::kFloat);
    const Tensor got =
        backend_.normalise(unit.mul(scale), at::kFloat, 0).narrow(1, 0, 8).narrow(2, 0, 16);
    expect_near(got, unit.to(at::kDouble).div(unit.to(at::kDouble).norm()), std::to_string(scale));
  }
}

// Of matrices with norms above eps, below it, far below it and 0.
TEST_P(BackendTest, NormaliseDividesByNoLessThanEps) {
  for (const at::ScalarType source : {at::kDouble, at::kFloat}) {
    const Tensor unit = random({4, 8, 16}, source);
    const Tensor x = unit.div(unit.norm(2, at::IntArrayRef{-2, -1}, /*keepdim=*/true));
    for (const auto& [i, norm] : {std::pair{0, 1e-6}, {1, 1e-8}, {2, 1e-30}, {3, 0.0}})
      x[i].mul_(norm);
    const Tensor got = backend_.normalise(x, at::kDouble, 1e-7).narrow(1, 0, 8).narrow(2, 0, 16);
    for (const auto& [i, norm] : {std::pair{0, 1.0}, {1, 0.1}, {2, 1e-23}, {3, 0.0}})
      EXPECT_NEAR(got[i].norm().item().toDouble(), norm, 1e-5 * norm) << source << " " << i;
  }
  const Tensor small = random({1, 8, 16}, at::kDouble).mul(1e-250);
  EXPECT_LT(backend_.normalise(small, at::kDouble, 1e-7).norm().item().toDouble(), 1e-240);
}

TEST_P(BackendTest, NormaliseMakesWhatIsNotFiniteNanAndLeavesOtherMatricesAlone) {
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor x = random({3, 6, 8}, dtype);
    x[0][5][7].fill_(kNan);
    x[1][0][1].fill_(-std::numeric_limits<double>::infinity());
    const Tensor got = backend_.normalise(x, dtype, 0).narrow(1, 0, 6).narrow(2, 0, 8);
    EXPECT_TRUE(got[0][5][7].isnan().item().toBool()) << dtype;
    EXPECT_TRUE(got[1][0][1].isnan().item().toBool()) << dtype;
    EXPECT_FALSE(got.narrow(0, 0, 2).isinf().any().item().toBool()) << dtype;
    EXPECT_TRUE(got[2].isfinite().all().item().toBool()) << dtype;
  }
}

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

TEST_P(BackendTest, TakesMomentumAndItsDirection) {
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
TEST_P(BackendTest, StartsFromTheNormalisedDirection) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const double size : {1.0, 1e-9, 1e-20, 1e20, 0.0}) {
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

TEST_P(BackendTest, StartsFromTheMomentumWhereAStepDoesNotApply) {
  const Tensor momentum = random({5, 7}, at::kFloat);
  const Tensor before = momentum.clone();
  const Tensor gradient = filled({5, 7}, kNan, at::kFloat);
  const Start start =
      backend_.start(momentum_of(momentum, gradient, 0.9, true, kFalse), at::kFloat, 0);
  EXPECT_TRUE(momentum.equal(before));
  expect_near(start.x.mul(start.scale).narrow(0, 0, 5).narrow(1, 0, 7),
              before.to(at::kDouble).div(before.to(at::kDouble).norm()), "fp32");
}

// [9, 14] of a product with 16 rows and columns; one matrix, a batch and blocks of columns.
TEST_P(BackendTest, FinishesWithTheLastProduct) {
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
      const PendingProduct product{0.5, operand(16, 16), 0.25, operand(16, 32), operand(32, 16)};
      const auto wide = [](const Tensor& x) { return x.to(at::kDouble); };
      const Tensor direction = wide(product.c)
                                   .mul(product.beta)
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
        EXPECT_LE(off, applies ? 0.125 * tolerance(dtype) * direction.norm().item().toDouble() +
                                     tolerance(at::kFloat)
                               : 0)
            << dtype << " " << num_blocks;
      }
    }
  }
}

TEST_P(BackendTest, AddsAMultiple) {
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor out = random({2, 51, 67}, dtype);
    const Tensor x = random({2, 51, 67}, dtype);
    const Tensor expected = out.to(at::kDouble).add(x.to(at::kDouble), -1.7131);
    backend_.add(out, x, -1.7131);
    expect_near(out, expected, toString(dtype));
  }
}

TEST_P(BackendTest, MovesWeightsByADirectionOfAnyDtype) {
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

TEST_P(BackendTest, LeavesMomentumAndWeightsAloneWhereAStepDoesNotApply) {
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
TEST(CpuBackend, HasTheBitsOfPlainLoopsWhateverTheMachineAndTheNumberOfThreads) {
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

TEST_P(BackendTest, KeepsNothingOfTheOldMomentumWithoutMomentum) {
  const Tensor momentum = filled({1, 3, 5}, 1e8, at::kFloat);
  const Tensor gradient = random({1, 3, 5}, at::kFloat);
  const Tensor direction = backend_.take_momentum(momentum_of(momentum, gradient, 0, true));
  EXPECT_TRUE(momentum.equal(gradient));
  EXPECT_TRUE(direction.equal(gradient));
}

// Which are the process's, and the user's.
TEST(AtenBackend, LeavesTheOptionsOfCublasAsTheyAre) {
  const auto option = [] { return at::globalContext().allowFP16ReductionCuBLAS(); };
  const Tensor x = random({5, 5}, at::kHalf);
  const Tensor out = at::empty_like(x);
  for (const bool allows : {true, false}) {
    at::globalContext().setAllowFP16ReductionCuBLAS(allows, allows);
    const auto before = option();
    aten_backend().product(out, 0, out, 1, x, x);
    EXPECT_EQ(option(), before);
  }
  at::globalContext().setAllowFP16ReductionCuBLAS(true);
}

TEST(BackendOf, IsTheCpusForCpusAndAtensForTheRest) {
  EXPECT_EQ(&backend_of(c10::Device(c10::kCPU)), &cpu_backend());
  EXPECT_EQ(&backend_of(c10::Device(c10::kCUDA, 1)), &aten_backend());
  EXPECT_EQ(&backend_of(c10::Device(c10::kXPU)), &aten_backend());
}

TEST(BackendsOf, AreTheKernelsAndBlasWhereTheMachineHasBoth) {
  using Backends = std::vector<const Backend*>;
  EXPECT_EQ(backends_of(c10::Device(c10::kCUDA), at::kBFloat16), Backends{&aten_backend()});
  const c10::Device cpu(c10::kCPU);
  for (const at::ScalarType dtype : {at::kDouble, at::kHalf})
    EXPECT_EQ(backends_of(cpu, dtype), Backends{&cpu_backend()});
  for (const auto& [dtype, of_kernels] : {std::pair{at::kFloat, kernels::Dtype::kFloat},
                                          {at::kBFloat16, kernels::Dtype::kBFloat16}}) {
    const Backends found = backends_of(cpu, dtype);
    EXPECT_EQ(std::ranges::count(found, &cpu_backend()), 1);
    EXPECT_EQ(std::ranges::count(found, &avx512_backend()),
              kernels::multiplies(of_kernels) ? 1 : 0);
  }
}

}  // namespace
}  // namespace dmuon::newton_schulz
