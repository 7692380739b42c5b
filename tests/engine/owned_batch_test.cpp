#include "dmuon/engine/owned_batch.h"

#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace dmuon::engine {
namespace {

OwnedBatch make_batch() { return {{4, 9}, 2, 3, c10::kCPU}; }

at::Tensor row(double first, at::ScalarType dtype) {
  return at::arange(first, first + 6, at::TensorOptions().dtype(dtype));
}

// All of a matrix.
void accumulate(OwnedBatch* batch, std::size_t place, const at::Tensor& values, double scale) {
  batch->accumulate(place, 0, values, scale);
  batch->filled[place] = true;
}

void poison(OwnedBatch* batch) { batch->gradient.fill_(std::numeric_limits<double>::quiet_NaN()); }

TEST(OwnedBatch, OverwritesWhatItDoesNotHold) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    OwnedBatch batch = make_batch();
    poison(&batch);
    accumulate(&batch, 1, row(1, dtype), 0.5);
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(batch.gradient[1].view({-1})[i].item<float>(), 0.5F * static_cast<float>(1 + i));
    }
    EXPECT_EQ(batch.filled, (std::vector<bool>{false, true}));
    EXPECT_TRUE(std::isnan(batch.gradient[0][0][0].item<float>()));
  }
}

TEST(OwnedBatch, AddsToWhatItHolds) {
  OwnedBatch batch = make_batch();
  accumulate(&batch, 0, row(0, at::kBFloat16), 2);
  accumulate(&batch, 0, row(10, at::kFloat), 0.25);
  for (int i = 0; i < 6; ++i) {
    const double expected = 2.0 * i + 0.25 * (10 + i);
    EXPECT_EQ(batch.gradient[0].view({-1})[i].item<float>(), static_cast<float>(expected));
  }
}

TEST(OwnedBatch, TakesAMatrixInPieces) {
  OwnedBatch batch = make_batch();
  poison(&batch);
  const at::Tensor values = row(1, at::kFloat);
  for (int i = 0; i < 2; ++i) {
    batch.accumulate(0, 0, values.narrow(0, 0, 4), 1);
    batch.accumulate(0, 4, values.narrow(0, 4, 2), 1);
    batch.filled[0] = true;
  }
  EXPECT_TRUE(batch.gradient[0].view({-1}).equal(at::add(values, values)));
}

// 0.1 in bf16 has 8 bits; sums of a hundred of them in bf16 would stop growing.
TEST(OwnedBatch, AccumulatesABf16WireInFp32) {
  OwnedBatch batch = make_batch();
  const at::Tensor wire = at::full({6}, 0.1, at::TensorOptions().dtype(at::kBFloat16));
  for (int i = 0; i < 1000; ++i) accumulate(&batch, 0, wire, 1);
  EXPECT_NEAR(batch.gradient[0][0][0].item<double>(), 1000 * wire[0].item<double>(), 1e-2);
}

TEST(OwnedBatch, SquaresNormsBeyondTheRangeOfFp32) {
  OwnedBatch batch = make_batch();
  accumulate(&batch, 0, at::full({6}, 1e-30), 1);
  accumulate(&batch, 1, at::full({6}, 1e30), 1);
  const std::vector<double> squared = batch.squared_norms();
  EXPECT_NEAR(squared[0] / 6e-60, 1, 1e-6);
  EXPECT_NEAR(squared[1] / 6e60, 1, 1e-6);
}

TEST(OwnedBatch, CountsNoNormWhereItHoldsNothing) {
  OwnedBatch batch = make_batch();
  poison(&batch);
  accumulate(&batch, 1, at::full({6}, 2.0), 1);
  const std::vector<double> squared = batch.squared_norms();
  EXPECT_EQ(squared[0], 0);
  EXPECT_DOUBLE_EQ(squared[1], 24);
}

TEST(OwnedBatch, TellsNanAndInfinity) {
  OwnedBatch batch = make_batch();
  at::Tensor values = row(0, at::kFloat);
  values[3] = std::numeric_limits<float>::infinity();
  accumulate(&batch, 0, values, 1);
  values[3] = std::numeric_limits<float>::quiet_NaN();
  accumulate(&batch, 1, values, 1);
  EXPECT_TRUE(std::isinf(batch.squared_norms()[0]));
  EXPECT_TRUE(std::isnan(batch.squared_norms()[1]));
}

TEST(OwnedBatch, HoldsMasterAndGradientInFp32) {
  const OwnedBatch batch = make_batch();
  EXPECT_EQ(batch.num_bytes(), 2 * 2 * 6 * 4);
}

}  // namespace
}  // namespace dmuon::engine
