#include "dmuon/newton_schulz/products.h"

#include <ATen/Context.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cpu/products.h"
#include "tests/newton_schulz/every_backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

Tensor mirrored(const Tensor& square) { return square.tril().add(square.tril(-1).mT()); }

class ProductsTest : public EveryProducts {};

INSTANTIATE_TEST_SUITE_P(All, ProductsTest, EveryProducts::all(), EveryProducts::name_of);

TEST_P(ProductsTest, ProductAgreesWithFp64AtOddAndEmptySizes) {
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
      products_.product(out, 0.5, c, 0.25, a, b);
      expect_near(out, plain_product(0.5, c, 0.25, a, b), where);

      // Without an addend, which may then hold anything; into a slice; in place.
      products_.product(out, 0, filled({rows, cols}, kNan, dtype), 1, a, b);
      const Tensor exact = plain_product(0, c, 1, a, b);
      expect_near(out, exact, where);
      const Tensor wide = filled({rows, cols + 3}, 7, dtype);
      products_.product(wide.narrow(1, 1, cols), 0, wide, 1, a, b);
      expect_near(wide.narrow(1, 1, cols), exact, where);
      EXPECT_TRUE(wide.select(1, 0)
                      .eq(7)
                      .logical_and(wide.select(1, cols + 1).eq(7))
                      .all()
                      .item()
                      .toBool());
      out.copy_(c);
      products_.product(out, -1, out, 1, a, b);
      expect_near(out, plain_product(-1, c, 1, a, b), where);
    }
  }
}

TEST_P(ProductsTest, ProductOfABatchIsThatOfEachMatrix) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const std::int64_t num_batch : {0, 1, 3}) {
      const Tensor a = random({num_batch, 9, 17}, dtype);
      const Tensor b = random({num_batch, 17, 11}, dtype);
      const Tensor c = random({num_batch, 9, 11}, dtype);
      const Tensor out = filled({num_batch, 9, 11}, kNan, dtype);
      products_.product(out, 2, c, -0.5, a, b);
      for (std::int64_t i = 0; i < num_batch; ++i) {
        expect_near(out[i], plain_product(2, c[i], -0.5, a[i], b[i]), toString(dtype));
      }
    }
  }
}

// Sizes below, at and above those that the CPU divides into panels, and primes.
TEST_P(ProductsTest, SymmetricProductAgreesWithFp64) {
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
          products_.symmetric_product(r, 0, r, 1, x, x.mT(), panel_rows);
          expect_near(r, square, where);

          if (n != 131) continue;
          const Tensor z = filled({m, m}, kNan, dtype);
          products_.symmetric_product(z, 0.5, rounded, 0.25, rounded, rounded, panel_rows);
          expect_near(z, of_square, where);
          products_.symmetric_product(r, 0.5, r, 0.25, x, x.mT(), panel_rows);  // c is out
          expect_near(r, square.mul(0.75), where);
        }
      }
    }
  }
}

TEST(CpuProducts, MirrorsTheLowerTriangleOfASymmetricProduct) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const std::int64_t m : {1, 2, 31, 32, 33, 97, 300}) {
      // Not symmetric, so that it is seen which triangle is kept.
      const Tensor a = random({2, m, 5}, dtype);
      const Tensor b = random({2, 5, m}, dtype);
      const Tensor out = filled({2, m, m}, kNan, dtype);
      cpu_products().symmetric_product(out, 0, out, 1, a, b, 128);
      for (std::int64_t i = 0; i < 2; ++i) {
        const Tensor full = plain_product(0, at::zeros({m, m}), 1, a[i], b[i]);
        EXPECT_TRUE(at::equal(out[i], out[i].mT())) << m;
        expect_near(out[i], mirrored(full), std::to_string(m));
      }
    }
  }
}

TEST(Products, WithoutWideSquaresComputeNone) {
  const Tensor x = random({4, 4}, at::kBFloat16);
  const WideSquare square{x, x, x};
  for (const Products* products : {&cpu_products(), &aten_products()}) {
    EXPECT_FALSE(products->has_wide_squares(at::kBFloat16));
    EXPECT_THROW(products->wide_gram(square, 1, x), core::InternalError);
    EXPECT_THROW(products->wide_product(square, 1, square, 1, square, square), core::InternalError);
    EXPECT_THROW(computed(*products, {1, x, 1, x, x, x}), core::InternalError);
  }
}

// Which are the process's, and the user's.
TEST(AtenProducts, LeavesTheOptionsOfCublasAsTheyAre) {
  const auto option = [] { return at::globalContext().allowFP16ReductionCuBLAS(); };
  const Tensor x = random({5, 5}, at::kHalf);
  const Tensor out = at::empty_like(x);
  for (const bool allows : {true, false}) {
    at::globalContext().setAllowFP16ReductionCuBLAS(allows, allows);
    const auto before = option();
    aten_products().product(out, 0, out, 1, x, x);
    EXPECT_EQ(option(), before);
  }
  at::globalContext().setAllowFP16ReductionCuBLAS(true);
}

TEST(ProductsOf, AreTheKernelsAndBlasWhereTheMachineHasBoth) {
  using All = std::vector<const Products*>;
  EXPECT_EQ(products_of(c10::Device(c10::kCUDA), at::kBFloat16), All{&aten_products()});
  const c10::Device cpu(c10::kCPU);
  for (const at::ScalarType dtype : {at::kDouble, at::kHalf})
    EXPECT_EQ(products_of(cpu, dtype), All{&cpu_products()});
  for (const auto& [dtype, of_kernels] : {std::pair{at::kFloat, kernels::cpu::Dtype::kFloat},
                                          {at::kBFloat16, kernels::cpu::Dtype::kBFloat16}}) {
    const All found = products_of(cpu, dtype);
    EXPECT_EQ(std::ranges::count(found, &cpu_products()), 1);
    EXPECT_EQ(std::ranges::count(found, &avx512_products()),
              kernels::cpu::multiplies(of_kernels) ? 1 : 0);
  }
}

}  // namespace
}  // namespace dmuon::newton_schulz
