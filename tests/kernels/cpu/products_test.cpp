#include "dmuon/kernels/cpu/products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "dmuon/core/error.h"
#include "tests/kernels/cpu/workers.h"

namespace dmuon::kernels::cpu {
namespace {

// Numbers of a dtype in memory, and in fp64.
struct Fp32 {
  static constexpr Dtype kDtype = Dtype::kFloat;
  static constexpr double kTolerance = 2e-6;
  using Entry = float;
  static Entry of(double value) { return static_cast<float>(value); }
  static double wide(Entry entry) { return entry; }
};

struct Bf16 {
  static constexpr Dtype kDtype = Dtype::kBFloat16;
  static constexpr double kTolerance = 4e-3;  // half a unit of the last place, of each entry
  using Entry = std::uint16_t;
  // Cuts off the lower half; it need not round.
  static Entry of(double value) {
    const auto narrow = static_cast<float>(value);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &narrow, sizeof bits);
    return static_cast<Entry>(bits >> 16);
  }
  static double wide(Entry entry) {
    const std::uint32_t bits = std::uint32_t{entry} << 16;
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

template <typename T>
class ProductsTest : public testing::Test {
 protected:
  using Stored = typename T::Entry;

  void SetUp() override {
    if (!multiplies(T::kDtype)) GTEST_SKIP() << "this machine lacks the instructions";
  }

  std::vector<Stored> random(std::int64_t size) {
    std::normal_distribution<double> normal;
    std::vector<Stored> entries(static_cast<std::size_t>(size));
    for (Stored& entry : entries) entry = T::of(normal(generator_));
    return entries;
  }

  static double at(const Operand& x, std::int64_t row, std::int64_t col) {
    return T::wide(static_cast<const Stored*>(x.data)[row * x.row_stride + col * x.col_stride]);
  }

  // beta c + alpha a b in fp64, row after row.
  static std::vector<double> exact(const Product& product) {
    std::vector<double> all;
    for (std::int64_t row = 0; row < product.rows; ++row) {
      for (std::int64_t col = 0; col < product.cols; ++col) {
        double sum = 0;
        for (std::int64_t k = 0; k < product.inner; ++k)
          sum += at(product.a, row, k) * at(product.b, k, col);
        const double addend =
            product.beta == 0 ? 0 : at({product.c, product.c_stride, 1}, row, col);
        all.push_back(product.beta * addend + product.alpha * sum);
      }
    }
    return all;
  }

  // Of `out` and what is exact, relative to the latter's norm.
  static double error(const Product& product, const std::vector<double>& exact) {
    double off = 0;
    double norm = 0;
    for (std::int64_t row = 0; row < product.rows; ++row) {
      for (std::int64_t col = 0; col < product.cols; ++col) {
        const double should = exact[static_cast<std::size_t>(row * product.cols + col)];
        const double is = at({product.out, product.out_stride, 1}, row, col);
        off += (is - should) * (is - should);
        norm += should * should;
      }
    }
    return norm == 0 ? off : std::sqrt(off / norm);
  }

  std::mt19937 generator_{0};
};

using BothDtypes = testing::Types<Fp32, Bf16>;
TYPED_TEST_SUITE(ProductsTest, BothDtypes, );

// Of m x m entries the lower triangle onto the upper one.
template <typename Entry>
void mirror(std::vector<Entry>& square, std::int64_t m) {
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < i; ++j)
      square[static_cast<std::size_t>(j * m + i)] = square[static_cast<std::size_t>(i * m + j)];
}

// Sizes of nothing, below, at and above those of tiles, units and words; operands either way round,
// which begin at no multiple of a word; an output with room between its rows, which stays as it is.
TYPED_TEST(ProductsTest, AgreesWithFp64WhateverTheSizesAndStrides) {
  using Entry = typename TypeParam::Entry;
  const Entry kept = TypeParam::of(7);
  for (const auto& [rows, cols] :
       {std::pair{0, 3}, {3, 0}, {1, 1}, {7, 13}, {8, 48}, {16, 16}, {17, 33}, {131, 100}}) {
    for (const std::int64_t inner : {0, 1, 2, 3, 16, 31, 32, 33, 64, 101}) {
      for (const bool turned : {false, true}) {
        const std::vector<Entry> of_a = this->random(rows * inner + 1);
        const std::vector<Entry> of_b = this->random(inner * cols + 1);
        const std::vector<Entry> c = this->random(rows * cols);
        std::vector<Entry> out(static_cast<std::size_t>(rows * (cols + 3)), kept);
        const Operand a{of_a.data() + 1, turned ? 1 : inner, turned ? rows : 1};
        const Operand b{of_b.data() + 1, turned ? 1 : cols, turned ? inner : 1};
        for (const double beta : {0.0, 0.5}) {
          const Product product{rows, cols,       inner,    0.25,
                                a,    b,          beta,     beta == 0 ? nullptr : c.data(),
                                cols, out.data(), cols + 3, false};
          multiply(product, TypeParam::kDtype, serially);
          EXPECT_LE(this->error(product, this->exact(product)), TypeParam::kTolerance)
              << rows << " " << cols << " " << inner << " " << turned << " " << beta;
          for (std::int64_t row = 0; row < rows; ++row)
            for (std::int64_t i = 0; i < 3; ++i)
              EXPECT_EQ(out[static_cast<std::size_t>(row * (cols + 3) + cols + i)], kept);
        }
      }
    }
  }
}

// Sizes below and above those of a tile and a unit; the room between rows of out stays as it is.
TYPED_TEST(ProductsTest, AddsToFp32WhatItKeeps) {
  using Entry = typename TypeParam::Entry;
  for (const auto& [rows, cols, inner] :
       {std::tuple{1, 1, 1}, {7, 13, 5}, {17, 33, 64}, {300, 100, 31}, {9, 5, 0}, {40, 50, 1501}}) {
    const std::vector<Entry> a = this->random(rows * inner);
    const std::vector<Entry> b = this->random(inner * cols);
    const std::vector<Entry> c = this->random(rows * cols);
    for (const auto& [beta, kept] : {std::pair{0.0, 0.75}, {0.5, 0.75}, {0.5, 0.0}}) {
      const std::int64_t stride = cols + 3;
      std::vector<float> out(static_cast<std::size_t>(rows * stride), 7);
      Product product{
          rows, cols,       inner,  0.25, {a.data(), inner, 1}, {b.data(), cols, 1}, beta, c.data(),
          cols, out.data(), stride, false};
      product.decay = kept;
      multiply(product, TypeParam::kDtype, on_threads);
      const std::vector<double> exact = this->exact(product);
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t col = 0; col < stride; ++col) {
          const double should =
              col < cols ? kept * 7 + exact[static_cast<std::size_t>(row * cols + col)] : 7;
          EXPECT_NEAR(out[static_cast<std::size_t>(row * stride + col)], should, 1e-4)
              << rows << " " << cols << " " << row << " " << col;
        }
      }
    }
  }
}

// Of the addend's rows, and of its columns; stored, and added to fp32.
TYPED_TEST(ProductsTest, ScalesTheAddend) {
  using Entry = typename TypeParam::Entry;
  constexpr std::int64_t kRows = 131;
  constexpr std::int64_t kCols = 100;
  const std::vector<Entry> a = this->random(kRows);
  const std::vector<Entry> b = this->random(kCols);
  const std::vector<Entry> c = this->random(kRows * kCols);
  std::vector<float> factors;
  for (std::int64_t i = 0; i < kRows; ++i) factors.push_back(static_cast<float>(i - 50));
  for (const bool of_rows : {false, true}) {
    std::vector<Entry> out(kRows * kCols);
    Product product{
        kRows, kCols,      1,     2,    {a.data(), 1, 1}, {b.data(), kCols, 1}, 0.5, c.data(),
        kCols, out.data(), kCols, false};
    std::vector<double> exact = this->exact(product);
    for (std::int64_t i = 0; i < kRows * kCols; ++i) {
      const float factor = factors[static_cast<std::size_t>(of_rows ? i / kCols : i % kCols)];
      exact[static_cast<std::size_t>(i)] +=
          0.5 * (factor - 1) * TypeParam::wide(c[static_cast<std::size_t>(i)]);
    }
    (of_rows ? product.row_factors : product.col_factors) = factors.data();
    multiply(product, TypeParam::kDtype, on_threads);
    EXPECT_LE(this->error(product, exact), TypeParam::kTolerance);

    std::vector<float> added(kRows * kCols, 7);
    product.out = added.data();
    product.decay = 0.25;
    multiply(product, TypeParam::kDtype, serially);
    for (std::size_t i = 0; i < exact.size(); ++i)
      ASSERT_NEAR(added[i], exact[i] + 1.75, 1e-4) << of_rows << " " << i;
  }
}

// Several units, and vectors that are multiplied in several parts.
TYPED_TEST(ProductsTest, AgreesWithFp64WhereOperandsAreLargerThanCaches) {
  using Entry = typename TypeParam::Entry;
  constexpr std::int64_t kRows = 250;
  constexpr std::int64_t kCols = 490;
  constexpr std::int64_t kInner = 1501;
  const std::vector<Entry> a = this->random(kRows * kInner);
  const std::vector<Entry> b = this->random(kInner * kCols);
  std::vector<Entry> out(kRows * kCols);
  const Product product{
      kRows, kCols,      kInner, 1,    {a.data(), kInner, 1}, {b.data(), kCols, 1}, 0, nullptr,
      0,     out.data(), kCols,  false};
  multiply(product, TypeParam::kDtype, serially);
  EXPECT_LE(this->error(product, this->exact(product)), TypeParam::kTolerance);

  // The other way round its factors do not commute; out is its own addend.
  const std::vector<Entry> other = this->random(kCols * kInner);
  std::vector<Entry> square(kCols * kCols, TypeParam::of(3));
  const Product symmetric{kCols,
                          kCols,
                          kInner,
                          1,
                          {other.data(), kInner, 1},
                          {b.data(), kCols, 1},
                          -0.5,
                          square.data(),
                          kCols,
                          square.data(),
                          kCols,
                          true};
  std::vector<double> exact = this->exact(symmetric);
  mirror(exact, kCols);
  multiply(symmetric, TypeParam::kDtype, on_threads);
  EXPECT_LE(this->error(symmetric, exact), TypeParam::kTolerance);
}

// The factors do not commute, so that it is seen which half is computed; out is its own addend.
TYPED_TEST(ProductsTest, MirrorsTheLowerTriangleBitByBit) {
  using Entry = typename TypeParam::Entry;
  for (const std::int64_t m : {1, 15, 16, 17, 24, 49, 96, 135, 300}) {
    const std::vector<Entry> a = this->random(m * 37);
    const std::vector<Entry> b = this->random(37 * m);
    std::vector<Entry> out = this->random(m * m);
    mirror(out, m);
    const Product product{
        m, m, 37, 1, {a.data(), 37, 1}, {b.data(), m, 1}, -0.5, out.data(), m, out.data(), m, true};
    std::vector<double> exact = this->exact(product);
    mirror(exact, m);
    multiply(product, TypeParam::kDtype, serially);
    std::vector<Entry> mirrored = out;
    mirror(mirrored, m);
    EXPECT_EQ(out, mirrored) << m;
    EXPECT_LE(this->error(product, exact), TypeParam::kTolerance) << m;
  }
}

TYPED_TEST(ProductsTest, HasTheSameBitsOnAnyThreadsAndWhereverItsOperandsLie) {
  using Entry = typename TypeParam::Entry;
  constexpr std::int64_t kRows = 300;
  constexpr std::int64_t kInner = 77;
  const std::vector<Entry> x = this->random(kRows * kInner);
  std::vector<Entry> moved(5);
  moved.insert(moved.end(), x.begin(), x.end());
  std::vector<Entry> columns(x.size());
  for (std::int64_t i = 0; i < kRows; ++i)
    for (std::int64_t k = 0; k < kInner; ++k)
      columns[static_cast<std::size_t>(k * kRows + i)] =
          x[static_cast<std::size_t>(i * kInner + k)];
  const auto product = [&](const Operand& a, bool symmetric, const Workers& workers) {
    std::vector<Entry> out(kRows * kRows);
    multiply({kRows,
              kRows,
              kInner,
              1,
              a,
              {a.data, a.col_stride, a.row_stride},
              0,
              nullptr,
              0,
              out.data(),
              kRows,
              symmetric},
             TypeParam::kDtype, workers);
    return out;
  };
  const Operand plain{x.data(), kInner, 1};
  const std::vector<Entry> expected = product(plain, true, serially);
  EXPECT_EQ(product(plain, true, on_threads), expected);
  EXPECT_EQ(product(plain, false, on_threads), expected);  // a a' is symmetric by itself
  EXPECT_EQ(product({moved.data() + 5, kInner, 1}, true, serially), expected);
  EXPECT_EQ(product({columns.data(), 1, kRows}, true, serially), expected);
}

TYPED_TEST(ProductsTest, ANanSpreadsToItsRowAndColumnOnly) {
  using Entry = typename TypeParam::Entry;
  constexpr std::int64_t kSize = 40;
  std::vector<Entry> a = this->random(kSize * kSize);
  a[3 * kSize + 5] = TypeParam::of(std::numeric_limits<double>::quiet_NaN());
  std::vector<Entry> out(kSize * kSize);
  multiply({kSize,
            kSize,
            kSize,
            1,
            {a.data(), kSize, 1},
            {a.data(), 1, kSize},
            0,
            nullptr,
            0,
            out.data(),
            kSize,
            true},
           TypeParam::kDtype, serially);
  for (std::int64_t i = 0; i < kSize; ++i)
    for (std::int64_t j = 0; j < kSize; ++j)
      EXPECT_EQ(std::isnan(TypeParam::wide(out[static_cast<std::size_t>(i * kSize + j)])),
                i == 3 || j == 3);
}

TYPED_TEST(ProductsTest, ThrowsForWhatExcludesEachOther) {
  const float factor = 1;
  Product symmetric{.symmetric = true, .decay = 1};
  EXPECT_THROW(multiply(symmetric, TypeParam::kDtype, serially), core::InternalError);
  symmetric = {.symmetric = true, .row_factors = &factor};
  EXPECT_THROW(multiply(symmetric, TypeParam::kDtype, serially), core::InternalError);
  const Product both{.row_factors = &factor, .col_factors = &factor};
  EXPECT_THROW(multiply(both, TypeParam::kDtype, serially), core::InternalError);
}

TEST(Products, ThrowWhereTheInstructionsAreMissing) {
  for (const Dtype dtype : {Dtype::kFloat, Dtype::kBFloat16}) {
    if (multiplies(dtype)) continue;
    EXPECT_THROW(multiply({}, dtype, serially), core::InternalError);
  }
}

}  // namespace
}  // namespace dmuon::kernels::cpu
