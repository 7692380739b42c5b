#include "dmuon/newton_schulz/products/cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/products.h"

namespace dmuon::newton_schulz {
namespace {

// Counted panel by panel: equal parts of about 128 rows, each as far as its last row, from 256 on.
TEST(CpuProducts, CountsThePanelsOfASymmetricProduct) {
  const auto share = [](std::int64_t m) {
    return cpu_products().symmetric_cost(m, at::kBFloat16).share;
  };
  EXPECT_EQ(share(1), 1);
  EXPECT_EQ(share(255), 1);
  EXPECT_EQ(share(256), (1 + 2) / 4.0);
  EXPECT_EQ(cpu_products().symmetric_cost(256, at::kFloat).share, (1 + 2 + 3 + 4) / 16.0);
  EXPECT_EQ(cpu_products().symmetric_cost(768, at::kFloat).share, share(768));
  EXPECT_DOUBLE_EQ(share(384), (1 + 2 + 3) / 9.0);
  EXPECT_DOUBLE_EQ(share(385), (1 + 2 + 3 + 4) / 16.0);
  EXPECT_EQ(share(1024), (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) / 64.0);
}

TEST(CpuProducts, KeepsTheGramFormsMatricesInFp32AtLeast) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    EXPECT_EQ(cpu_products().gram_dtype(dtype), at::kFloat);
  }
  EXPECT_EQ(cpu_products().gram_dtype(at::kDouble), at::kDouble);
}

TEST(CpuProducts, WeighsFp32OtherwiseOnlyWhereBf16IsMultipliedInHardware) {
  const double fp32_cost = cpu_elementwise().default_dtype() == at::kBFloat16 ? 2.15 : 0.55;
  EXPECT_EQ(cpu_products().symmetric_cost(64, at::kBFloat16).gram_dtype,
            multiplies_bf16() ? fp32_cost : 1);
  for (const auto dtype : {at::kHalf, at::kFloat, at::kDouble}) {
    EXPECT_EQ(cpu_products().symmetric_cost(64, dtype).gram_dtype, 1);
  }
}

TEST(CpuProducts, BatchesWhatHasNoPanelsUnlessInFp64) {
  EXPECT_TRUE(cpu_products().batched(255, at::kFloat));
  EXPECT_FALSE(cpu_products().batched(256, at::kFloat));
  EXPECT_FALSE(cpu_products().batched(8, at::kDouble));
}

TEST(CpuProducts, TakesPartsOfEqualSizeThatCachesHold) {
  const int threads = at::get_num_threads();
  const auto at_once = [](std::int64_t count, at::ScalarType dtype) {
    return cpu_products().at_once(128, 128, count, dtype);
  };
  at::set_num_threads(1);
  EXPECT_EQ(at_once(1, at::kFloat), 1);
  EXPECT_EQ(at_once(11, at::kFloat), 11);  // 1.5 MB hold 6 of 256 KB
  EXPECT_EQ(at_once(12, at::kFloat), 6);
  EXPECT_EQ(at_once(64, at::kFloat), 7);
  EXPECT_EQ(at_once(64, at::kBFloat16), 32);  // 3 MB hold 24 of 128 KB
  EXPECT_EQ(cpu_products().at_once(255, 4096, 5, at::kFloat), 1);
  at::set_num_threads(2);
  EXPECT_EQ(at_once(64, at::kFloat), 13);
  EXPECT_EQ(cpu_products().at_once(255, 4096, 5, at::kFloat), 3);
  at::set_num_threads(threads);
}

TEST(CpuElementwise, PadsRowsAndColumnsTo64Bytes) {
  const at::Tensor x = at::randn({2, 33, 16});
  EXPECT_EQ(cpu_elementwise().normalise(x, at::kFloat, 0).sizes(), (at::IntArrayRef{2, 48, 16}));
  EXPECT_EQ(cpu_elementwise().normalise(x, at::kHalf, 0).sizes(), (at::IntArrayRef{2, 64, 32}));
}

TEST(CpuProducts, GivesEachMatrixOfABatchTheBitsThatItHasAlone) {
  const at::Tensor x = cpu_elementwise().normalise(at::randn({3, 64, 96}), at::kFloat, 0);
  const at::Tensor r = at::full({3, 64, 64}, 0.0);
  cpu_products().symmetric_product(r, 0, r, 1, x, x.mT(), 0);
  for (std::int64_t i = 0; i < 3; ++i) {
    const at::Tensor one = x.narrow(0, i, 1);
    const at::Tensor alone = at::full({1, 64, 64}, 0.0);
    cpu_products().symmetric_product(alone, 0, alone, 1, one, one.mT(), 0);
    EXPECT_TRUE(at::equal(alone, r.narrow(0, i, 1)));
  }
}

}  // namespace
}  // namespace dmuon::newton_schulz
