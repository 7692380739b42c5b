#include "dmuon/wire/buffer.h"

#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

namespace dmuon::wire {
namespace {

std::shared_ptr<BufferPool> make_pool() { return std::make_shared<BufferPool>(c10::kCPU); }

TEST(PackedBuffer, KeepsItsTensorAndViewsOverFreeingAndRefilling) {
  PackedBuffer buffer(make_pool(), 10, at::kFloat);
  const at::Tensor view = buffer.view(4, {2, 3});
  for (const float value : {1.0F, 2.0F}) {
    buffer.allocate();
    buffer.flat().fill_(value);
    EXPECT_EQ(view.sum().item<float>(), 6 * value);
    buffer.release();
    EXPECT_EQ(view.sizes(), (std::vector<std::int64_t>{2, 3}));
    EXPECT_FALSE(buffer.allocated());
  }
}

TEST(PackedBuffer, PlacesAMatrixRowByRowAtItsOffset) {
  PackedBuffer buffer(make_pool(), 10, at::kDouble);
  buffer.allocate();
  for (int i = 0; i < 10; ++i) buffer.flat()[i] = i;
  const at::Tensor view = buffer.view(4, {2, 3});
  for (int row = 0; row < 2; ++row) {
    for (int col = 0; col < 3; ++col) {
      EXPECT_EQ(view[row][col].item<double>(), 4 + 3 * row + col);
    }
  }
}

TEST(PackedBuffer, ThrowsWhereAFreedMatrixIsRead) {
  PackedBuffer buffer(make_pool(), 6, at::kFloat);
  const at::Tensor view = buffer.view(0, {2, 3});
  buffer.allocate();
  buffer.flat().fill_(1);
  buffer.release();
  EXPECT_THROW(view.sum(), c10::Error);
  EXPECT_THROW(view.t().mul(2), c10::Error);  // views of it can be made, as autograd does
  EXPECT_THROW(view.fill_(1), c10::Error);
  EXPECT_THROW(buffer.flat().sum(), c10::Error);
}

TEST(PackedBuffer, ThrowsWhereAMatrixIsReadBeforeItWasEverFilled) {
  PackedBuffer buffer(make_pool(), 6, at::kFloat);
  const at::Tensor view = buffer.view(0, {2, 3});
  EXPECT_THROW(view.const_data_ptr(), c10::Error);
}

TEST(PackedBuffer, GivesMatricesVersionCountersOfTheirOwn) {
  PackedBuffer buffer(make_pool(), 6, at::kFloat);
  buffer.allocate();
  const at::Tensor detached = buffer.view(0, {2, 3});
  const at::Tensor slice = buffer.slice(0, 6);
  const auto detached_version = detached._version();
  const auto slice_version = slice._version();
  buffer.flat().zero_();
  EXPECT_EQ(detached._version(), detached_version);
  EXPECT_GT(slice._version(), slice_version);
}

TEST(PackedBuffer, AllocatesAndReleasesOnce) {
  const auto pool = make_pool();
  {
    PackedBuffer buffer(pool, 4, at::kFloat);
    buffer.release();
    buffer.allocate();
    const void* data = buffer.flat().const_data_ptr();
    buffer.allocate();
    EXPECT_EQ(buffer.flat().const_data_ptr(), data);
    EXPECT_EQ(pool->current_bytes(), 16);
    buffer.release();
    buffer.release();
  }
  // A second give of one block would hand it out twice.
  PackedBuffer first(pool, 4, at::kFloat);
  PackedBuffer second(pool, 4, at::kFloat);
  first.allocate();
  second.allocate();
  EXPECT_NE(first.flat().const_data_ptr(), second.flat().const_data_ptr());
}

TEST(PackedBuffer, StaysFreedAndUncountedWhereMemoryIsLacking) {
  const auto pool = make_pool();
  PackedBuffer buffer(pool, std::int64_t{1} << 55, at::kFloat);
  const at::Tensor view = buffer.view(0, {2, 3});
  EXPECT_THROW(buffer.allocate(), c10::Error);
  EXPECT_FALSE(buffer.allocated());
  EXPECT_EQ(pool->current_bytes(), 0);
  EXPECT_EQ(pool->peak_bytes(), 0);
  EXPECT_THROW(view.sum(), c10::Error);
}

TEST(PackedBuffer, MayBeEmpty) {
  PackedBuffer buffer(make_pool(), 0, at::kFloat);
  EXPECT_NO_THROW(buffer.flat().sum());  // nothing is read
  buffer.allocate();
  EXPECT_EQ(buffer.flat().numel(), 0);
  buffer.release();
  EXPECT_FALSE(buffer.allocated());
  EXPECT_NO_THROW(buffer.flat().sum());
}

TEST(BufferPool, SharesOneBlockAmongBuffersThatTakeTurns) {
  const auto pool = make_pool();
  PackedBuffer a(pool, 100, at::kFloat);
  PackedBuffer b(pool, 60, at::kFloat);
  PackedBuffer c(pool, 200, at::kBFloat16);
  a.allocate();
  const void* data = a.flat().const_data_ptr();
  for (PackedBuffer* next : {&b, &c}) {
    a.release();
    next->allocate();
    EXPECT_EQ(next->flat().const_data_ptr(), data);
    next->release();
    a.allocate();
  }
  EXPECT_EQ(pool->peak_bytes(), 400);
}

TEST(BufferPool, FreesIdleBlocksBeforeItAllocates) {
  const auto pool = make_pool();
  PackedBuffer small(pool, 100, at::kFloat);
  PackedBuffer large(pool, 101, at::kFloat);
  small.allocate();
  small.release();
  EXPECT_EQ(pool->current_bytes(), 400);
  large.allocate();
  EXPECT_EQ(pool->current_bytes(), 404);
  EXPECT_EQ(pool->peak_bytes(), 404);
}

TEST(BufferPool, KeepsABlockOfMoreThanTwiceTheSizeFromASmallBuffer) {
  const auto pool = make_pool();
  PackedBuffer large(pool, 101, at::kFloat);
  PackedBuffer small(pool, 50, at::kFloat);
  large.allocate();
  large.release();
  small.allocate();
  EXPECT_EQ(pool->current_bytes(), 200);
}

TEST(BufferPool, CountsAllItHoldsAndWhatItIsTold) {
  const auto pool = make_pool();
  PackedBuffer a(pool, 10, at::kFloat);
  PackedBuffer b(pool, 10, at::kBFloat16);
  a.allocate();
  b.allocate();
  pool->count(1000);
  EXPECT_EQ(pool->current_bytes(), 1060);
  pool->count(-1000);
  EXPECT_EQ(pool->current_bytes(), 60);
  EXPECT_EQ(pool->peak_bytes(), 1060);
  pool->reset_peak();
  EXPECT_EQ(pool->peak_bytes(), 60);
  a.release();
  EXPECT_EQ(pool->current_bytes(), 60);
}

}  // namespace
}  // namespace dmuon::wire
