#include "dmuon/newton_schulz/cuda_kernels.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

namespace dmuon::newton_schulz {
namespace {

TEST(KeptZeros, AreOneForAStreamAndGrowWhereTheyMust) {
  const auto options = at::TensorOptions().dtype(at::kInt);
  int streams[2];
  const at::Tensor first = kept_zeros(3, options, &streams[0]);
  EXPECT_GE(first.numel(), 3);
  EXPECT_TRUE(first.eq(0).all().item().toBool());
  EXPECT_EQ(kept_zeros(first.numel(), options, &streams[0]).const_data_ptr(),
            first.const_data_ptr());
  EXPECT_NE(kept_zeros(3, options, &streams[1]).const_data_ptr(), first.const_data_ptr());
  const at::Tensor more = kept_zeros(first.numel() + 1, options, &streams[0]);
  EXPECT_GT(more.numel(), first.numel());
  EXPECT_EQ(first.use_count(), 2);  // for whoever is about to use it
  EXPECT_EQ(kept_zeros(3, options, &streams[0]).const_data_ptr(), more.const_data_ptr());
}

}  // namespace
}  // namespace dmuon::newton_schulz
