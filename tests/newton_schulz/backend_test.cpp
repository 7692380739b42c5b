#include "dmuon/newton_schulz/backend.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/products.h"
#include "tests/newton_schulz/every_backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

Tensor mirrored(const Tensor& square) { return square.tril().add(square.tril(-1).mT()); }

class BackendTest : public EveryBackend {};

INSTANTIATE_TEST_SUITE_P(All, BackendTest, EveryBackend::all(), EveryBackend::name_of);

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
        const Tensor square = plain_product(0, at::zeros({m, m}), 1, x, x.mT());
        const Tensor rounded = square.to(dtype);
        const Tensor of_square =
            n == 131 ? plain_product(0.5, rounded, 0.25, rounded, rounded) : Tensor();
        for (const std::int64_t panel_rows : {0, 1, 100, 128}) {
          const Tensor r = filled({m, m}, kNan, dtype);
          backend_.symmetric_product(r, 0, r, 1, x, x.mT(), panel_rows);
          expect_near(r, square, where);

          if (n != 131) continue;
          const Tensor z = filled({m, m}, kNan, dtype);
          backend_.symmetric_product(z, 0.5, rounded, 0.25, rounded, rounded, panel_rows);
          expect_near(z, of_square, where);
          backend_.symmetric_product(r, 0.5, r, 0.25, x, x.mT(), panel_rows);  // c is out
          expect_near(r, square.mul(0.75), where);
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

TEST(Backends, WithoutWideSquaresComputeNone) {
  const Tensor x = random({4, 4}, at::kBFloat16);
  const WideSquare square{x, x, x};
  for (const Backend* backend : {&cpu_backend(), &aten_backend()}) {
    EXPECT_FALSE(backend->has_wide_squares(at::kBFloat16));
    EXPECT_THROW(backend->wide_gram(square, 1, x), core::InternalError);
    EXPECT_THROW(backend->wide_product(square, 1, square, 1, square, square), core::InternalError);
    EXPECT_THROW(computed(*backend, {1, x, 1, x, x, x, x}), core::InternalError);
  }
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
