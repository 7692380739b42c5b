#include "dmuon/newton_schulz/product.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

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

double relative_error(const Tensor& got, const Tensor& expected) {
  return got.to(at::kDouble).sub(expected).norm().div(expected.norm()).item().toDouble();
}

// X X' and c + R R: sizes below, at and above the panel threshold, and primes.
TEST(SymmetricProduct, IsBitwiseSymmetricAndAgreesWithFp64) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t m : {1, 7, 67, 255, 256, 257, 389, 512}) {
      for (const std::int64_t n : {1, 13, 600}) {
        const Tensor x = at::randn({m, n}, at::kDouble).div(std::sqrt(m + n)).to(dtype);
        const Tensor r = at::full({m, m}, std::numeric_limits<double>::quiet_NaN(), dtype);
        symmetric_product(r, 0, r, 1, x, x.mT());
        const Tensor exact = x.to(at::kDouble).matmul(x.to(at::kDouble).mT());
        EXPECT_TRUE(at::equal(r, r.mT())) << m << " " << n << " " << dtype;
        EXPECT_LT(relative_error(r, exact), tolerance(dtype)) << m << " " << n << " " << dtype;

        const Tensor z = at::full({m, m}, std::numeric_limits<double>::quiet_NaN(), dtype);
        symmetric_product(z, 0.5, r, 0.25, r, r);
        const Tensor wide = r.to(at::kDouble);
        EXPECT_TRUE(at::equal(z, z.mT())) << m << " " << n << " " << dtype;
        EXPECT_LT(relative_error(z, wide.matmul(wide).mul(0.25).add(wide, 0.5)), tolerance(dtype))
            << m << " " << n << " " << dtype;
      }
    }
  }
}

TEST(SymmetricProduct, OfABatchEqualsEachAlone) {
  const Tensor x = at::randn({3, 64, 96});
  const Tensor r = at::full({3, 64, 64}, 0.0);
  symmetric_product(r, 0, r, 1, x, x.mT());
  for (std::int64_t i = 0; i < 3; ++i) {
    const Tensor alone = at::full({1, 64, 64}, 0.0);
    symmetric_product(alone, 0, alone, 1, x.narrow(0, i, 1), x.narrow(0, i, 1).mT());
    EXPECT_TRUE(at::equal(alone, r.narrow(0, i, 1)));
  }
}

TEST(MirrorLower, CopiesTheLowerTriangleAndNothingElse) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t m : {1, 2, 31, 32, 33, 97}) {
      const Tensor before = at::randn({2, m, m}).to(dtype);
      const Tensor after = before.clone();
      mirror_lower(after);
      EXPECT_TRUE(at::equal(after.tril(), before.tril()));
      EXPECT_TRUE(at::equal(after, after.mT()));
    }
  }
}

}  // namespace
}  // namespace dmuon::newton_schulz
