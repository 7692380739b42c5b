// Products of symmetric matrices that stay in fp32.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cpu/products.h"
#include "tests/kernels/cpu/workers.h"

namespace dmuon::kernels::cpu {
namespace {

using Bits = std::uint16_t;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// To the nearest, of two to the even one.
Bits bf16_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<Bits>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double wide(Bits entry) {
  const std::uint32_t bits = std::uint32_t{entry} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A WideSquare and its memory.
struct Held {
  explicit Held(std::int64_t size)
      : m(size),
        wide(at(size * size), std::numeric_limits<float>::quiet_NaN()),
        diagonal(at(size), -7),
        narrow(at(size * size), 0x7fc0) {}

  WideSquare view() { return {wide.data(), diagonal.data(), narrow.data()}; }

  // (i, j) of the whole matrix, and of what products multiply of it.
  double whole(std::int64_t i, std::int64_t j) const {
    return wide[at(i >= j ? i * m + j : j * m + i)];
  }
  double multiplied(std::int64_t i, std::int64_t j) const {
    return kernels::cpu::wide(narrow[at(i * m + j)]);
  }

  std::int64_t m;
  std::vector<float> wide;
  std::vector<float> diagonal;
  std::vector<Bits> narrow;
};

// That the three parts are of one matrix.
void expect_consistent(const Held& x) {
  for (std::int64_t i = 0; i < x.m; ++i) {
    EXPECT_EQ(x.diagonal[at(i)], x.wide[at(i * x.m + i)]) << i;
    for (std::int64_t j = 0; j < x.m; ++j) {
      const Bits should = i == j ? Bits{0} : bf16_of(static_cast<float>(x.whole(i, j)));
      ASSERT_EQ(x.narrow[at(i * x.m + j)], should) << x.m << ": " << i << " " << j;
    }
  }
}

class WideTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!multiplies(Dtype::kBFloat16)) GTEST_SKIP() << "this machine lacks the instructions";
  }

  float normal() { return static_cast<float>(normal_(generator_)); }

  // With a diagonal that is larger than the rest. What is above that in fp32 is no number.
  Held random(std::int64_t m) {
    Held x(m);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j <= i; ++j) {
        const float value = normal() + (i == j ? 10 : 0);
        x.wide[at(i * m + j)] = value;
        x.narrow[at(i * m + j)] = x.narrow[at(j * m + i)] = i == j ? Bits{0} : bf16_of(value);
      }
      x.diagonal[at(i)] = x.wide[at(i * m + i)];
    }
    return x;
  }

  std::mt19937 generator_{0};
  std::normal_distribution<double> normal_;
};

// Relative to the norm of what should be: of the lower triangle, where `exact(i, j)` tells it.
template <typename Exact>
double error(const Held& got, const Exact& exact) {
  double off = 0;
  double norm = 0;
  for (std::int64_t i = 0; i < got.m; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) {
      const double should = exact(i, j);
      off += std::pow(got.whole(i, j) - should, 2);
      norm += should * should;
    }
  }
  return norm == 0 ? off : std::sqrt(off / norm);
}

// Sizes below, at and above those of tiles and units.
const std::int64_t kSizes[] = {0, 1, 7, 15, 16, 17, 49, 130, 300};

// Of rows and of columns that lie side by side, as those of tall matrices do.
TEST_F(WideTest, AGramMatrixIsExactInFp32) {
  for (const std::int64_t m : kSizes) {
    for (const std::int64_t inner : {0, 1, 33, 900}) {
      std::vector<Bits> a(at(m * inner));
      for (Bits& entry : a) entry = bf16_of(normal());
      for (const bool turned : {false, true}) {
        const Operand operand{a.data(), turned ? 1 : inner, turned ? m : 1};
        Held out(m);
        multiply({.m = m, .inner = inner, .alpha = 0.25, .a = operand, .out = out.view()},
                 on_threads);
        expect_consistent(out);
        const auto entry = [&](std::int64_t i, std::int64_t k) {
          return wide(a[at(i * operand.row_stride + k * operand.col_stride)]);
        };
        const auto exact = [&](std::int64_t i, std::int64_t j) {
          double sum = 0;
          for (std::int64_t k = 0; k < inner; ++k) sum += entry(i, k) * entry(j, k);
          return 0.25 * sum;
        };
        EXPECT_LE(error(out, exact), 2e-6) << m << " " << inner << " " << turned;
      }
    }
  }
}

// a and b do not commute, so that it is seen which half is computed; or a is b, which is packed
// once. The addend is another square, or the result.
TEST_F(WideTest, OfAProductOnlyWhatIsOffBothDiagonalsIsRounded) {
  for (const std::int64_t m : kSizes) {
    for (const bool is_one : {false, true}) {
      Held a = random(m);
      Held other = random(m);
      Held& b = is_one ? a : other;
      Held c = random(m);
      for (const bool in_place : {false, true}) {
        Held result(m);
        Held& out = in_place ? c : result;
        const Held addend = c;
        multiply({.m = m,
                  .alpha = 0.25,
                  .a = a.view(),
                  .b = b.view(),
                  .beta = -0.5,
                  .c = c.wide.data(),
                  .out = out.view()},
                 in_place ? on_threads : serially);
        expect_consistent(out);
        const auto exact = [&](std::int64_t i, std::int64_t j) {
          double sum = a.whole(i, i) * b.whole(i, j) + (i == j ? 0 : a.whole(i, j) * b.whole(j, j));
          for (std::int64_t k = 0; k < m; ++k) sum += a.multiplied(i, k) * b.multiplied(k, j);
          return -0.5 * addend.whole(i, j) + 0.25 * sum;
        };
        EXPECT_LE(error(out, exact), 2e-6) << m << " " << is_one << " " << in_place;
      }
    }
  }
}

TEST_F(WideTest, WithoutAnAddendTheProductReadsNone) {
  Held a = random(40);
  Held none(40);
  Held zero = random(40);
  for (float& value : zero.wide) value = 0;
  Held with(40);
  Held without(40);
  multiply({.m = 40, .a = a.view(), .b = a.view(), .c = none.wide.data(), .out = without.view()},
           serially);
  multiply(
      {.m = 40, .a = a.view(), .b = a.view(), .beta = 1, .c = zero.wide.data(), .out = with.view()},
      serially);
  expect_consistent(without);
  EXPECT_EQ(with.narrow, without.narrow);
}

TEST_F(WideTest, HaveTheSameBitsOnAnyThreads) {
  constexpr std::int64_t kSize = 500;
  Held a = random(kSize);
  Held b = random(kSize);
  Held one(kSize);
  Held other(kSize);
  for (const auto& [out, workers] : {std::pair{&one, &serially}, {&other, &on_threads}}) {
    multiply({.m = kSize,
              .a = a.view(),
              .b = b.view(),
              .beta = 2,
              .c = a.wide.data(),
              .out = out->view()},
             *workers);
  }
  EXPECT_EQ(one.narrow, other.narrow);
  EXPECT_EQ(one.diagonal, other.diagonal);
  for (std::int64_t i = 0; i < kSize; ++i)
    for (std::int64_t j = 0; j <= i; ++j) ASSERT_EQ(one.whole(i, j), other.whole(i, j));
}

TEST(Wide, ThrowWhereTheInstructionsAreMissing) {
  if (multiplies(Dtype::kBFloat16)) GTEST_SKIP() << "this machine has them";
  EXPECT_THROW(multiply(WideGram{}, serially), core::InternalError);
  EXPECT_THROW(multiply(WideProduct{}, serially), core::InternalError);
}

}  // namespace
}  // namespace dmuon::kernels::cpu
