#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/products.h"

namespace dmuon::newton_schulz {
namespace {

TEST(AtenProducts, RunsInFp16WithFullProductsInBatchesAndKeepsGramMatricesOfBf16InFp32) {
  EXPECT_EQ(aten_elementwise().default_dtype(), at::kHalf);
  EXPECT_EQ(aten_products().gram_dtype(at::kHalf), at::kHalf);
  EXPECT_EQ(aten_products().symmetric_cost(4096, at::kHalf).share, 1);
  EXPECT_EQ(aten_products().symmetric_cost(4096, at::kHalf).gram_dtype, 1);
  EXPECT_EQ(aten_products().gram_dtype(at::kBFloat16), at::kFloat);
  EXPECT_EQ(aten_products().symmetric_cost(4096, at::kBFloat16).gram_dtype, 15);
  EXPECT_TRUE(aten_products().batched(4096, at::kDouble));
}

TEST(AtenProducts, OffersPanelsOfLargeResultsAndTakesNone) {
  EXPECT_EQ(aten_products().panel_rows(2047, at::kHalf), (std::vector<std::int64_t>{0}));
  EXPECT_EQ(aten_products().panel_rows(2049, at::kHalf), (std::vector<std::int64_t>{0, 1025, 513}));
}

}  // namespace
}  // namespace dmuon::newton_schulz
