#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/elementwise.h"
#include "tests/kernels/cuda/emulator/machine_emulated.h"
#include "tests/kernels/cuda/gpu.h"

namespace dmuon::kernels::cuda {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  std::int64_t batch, rows, cols;
  std::int64_t w_row_stride, w_batch_stride;
  std::int64_t u_row_stride, u_batch_stride;
  std::int64_t inner_batch = 1, w_inner_stride = 0, u_inner_stride = 0;

  std::size_t w_at(std::int64_t b, std::int64_t i, std::int64_t j) const {
    return static_cast<std::size_t>(b / inner_batch * w_batch_stride +
                                    b % inner_batch * w_inner_stride + i * w_row_stride + j);
  }
  std::size_t u_at(std::int64_t b, std::int64_t i, std::int64_t j) const {
    return static_cast<std::size_t>(b / inner_batch * u_batch_stride +
                                    b % inner_batch * u_inner_stride + i * u_row_stride + j);
  }
  template <typename At>
  std::size_t span(const At& at) const {
    std::size_t most = 0;
    for (std::int64_t b = 0; b < batch; ++b) most = std::max(most, at(b, rows - 1, cols - 1) + 1);
    return most;
  }
};

std::uint16_t narrow(float v, Half format) {
  return format == Half::kFp16 ? machine::f16_of(v) : machine::bf16_of(v);
}
float wide(std::uint16_t v, Half format) {
  return format == Half::kFp16 ? machine::float_of_f16(v) : machine::float_of_bf16(v);
}

// Equal bits, or two NaNs: processors keep other bits of a NaN.
bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

// Entries of a shape; whatever lies between them is NaN.
struct Case {
  Case(const Shape& s, Half format)
      : shape(s),
        half(format),
        w(s.span([&](auto... place) { return s.w_at(place...); }), kNan),
        u(s.span([&](auto... place) { return s.u_at(place...); }), 0x7fff) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for_each([&](std::size_t at_w, std::size_t at_u, std::int64_t) {
      w[at_w] = normal(random);
      u[at_u] = narrow(normal(random), format);
    });
  }

  template <typename Function>
  void for_each(const Function& function) const {
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      for (std::int64_t i = 0; i < shape.rows; ++i) {
        for (std::int64_t j = 0; j < shape.cols; ++j) {
          function(shape.w_at(b, i, j), shape.u_at(b, i, j), b);
        }
      }
    }
  }

  std::vector<float> expected(float decay, float factor) const {
    std::vector<float> moved = w;
    for_each([&](std::size_t at_w, std::size_t at_u, std::int64_t) {
      const float kept = decay * w[at_w];
      const float added = factor * wide(u[at_u], half);
      moved[at_w] = kept + added;
    });
    return moved;
  }

  Shape shape;
  Half half;
  std::vector<float> w;
  std::vector<std::uint16_t> u;
};

constexpr float kDecay = 0.99F;
constexpr float kFactor = -0.0213F;

/// @param scalars  decay and factor.
MoveWeights description(const Case& c, float* w, const std::uint16_t* u, const float* scalars,
                        const std::uint8_t* applies) {
  return {.batch = c.shape.batch,
          .rows = c.shape.rows,
          .cols = c.shape.cols,
          .w = w,
          .w_row_stride = c.shape.w_row_stride,
          .inner_batch = c.shape.inner_batch,
          .w_inner_stride = c.shape.w_inner_stride,
          .w_batch_stride = c.shape.w_batch_stride,
          .u = u,
          .u_format = c.half,
          .u_row_stride = c.shape.u_row_stride,
          .u_inner_stride = c.shape.u_inner_stride,
          .u_batch_stride = c.shape.u_batch_stride,
          .decay = scalars,
          .factor = scalars + 1,
          .applies = applies};
}

void expect_same(const std::vector<float>& got, const std::vector<float>& expected) {
  std::size_t differ = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) differ += same(got[i], expected[i]) ? 0 : 1;
  EXPECT_EQ(differ, 0U) << "of " << expected.size() << " entries";
}

class MoveWeightsTest : public GpuTest {};

TEST_F(MoveWeightsTest, HasTheBitsOfAPlainLoop) {
  const Shape shapes[] = {
      {1, 1, 1, 1, 0, 1, 0},                     // one entry
      {1, 1, 3, 3, 0, 8, 0},                     // no whole four
      {1, 37, 61, 61, 0, 61, 0},                 // odd, without padding
      {1, 37, 61, 64, 0, 72, 0},                 // odd, rows aligned
      {1, 129, 63, 63, 0, 64, 0},                // 7 mod 8; w's rows are not aligned, u's are
      {1, 5, 2056, 2056, 0, 2064, 0},            // several blocks, whole fours
      {1, 5, 2055, 2055, 0, 2055, 0},            // and single entries
      {3, 9, 100, 104, 9 * 104 + 4, 100, 900},   // a batch, with room between matrices
      {3, 9, 101, 101, 909, 104, 936},           // and not aligned
      {4, 16, 30, 120, 30, 32, 512},             // blocks of columns of one matrix
      {4, 16, 32, 128, 32, 32, 512},             // and aligned
      {6, 9, 10, 30, 270, 16, 480, 3, 10, 160},  // blocks of columns of two matrices
      {5, 8, 12, 36, 288, 16, 384, 3, 12, 128},  // and aligned, the last one left out
      {1, 700, 1, 1, 0, 4, 0},                   // a column
  };
  const OnGpu<std::uint8_t> applies({1});
  const OnGpu<float> scalars({kDecay, kFactor});
  for (const Half half : {Half::kFp16, Half::kBFloat16}) {
    for (const Shape& shape : shapes) {
      SCOPED_TRACE(testing::Message() << shape.batch << " x " << shape.rows << " x " << shape.cols);
      const Case c(shape, half);
      for (unsigned order = 1; order <= 8; ++order) {
        seed(order);
        const OnGpu<float> w(c.w);
        const OnGpu<std::uint16_t> u(c.u);
        move_weights(description(c, w.data(), u.data(), scalars.data(), applies.data()), 0,
                     stream_);
        ASSERT_EQ(synchronise(), 0) << found();
        expect_same(w.values(), c.expected(kDecay, kFactor));
      }
    }
  }
}

TEST_F(MoveWeightsTest, ScalesEachMatrix) {
  for (const Shape& shape :
       {Shape{5, 3, 10, 10, 30, 16, 64}, {6, 9, 12, 36, 324, 16, 480, 3, 12, 160}}) {
    Case c(shape, Half::kBFloat16);
    const OnGpu<std::uint8_t> applies({1});
    const OnGpu<float> scalars({kDecay, kFactor});
    const OnGpu<float> w(c.w);
    const OnGpu<std::uint16_t> u(c.u);
    const OnGpu<float> scales({0, 1, 0, 0.37F, 0, 4, 0, 1e-9F, 0, -3, 0, 1e30F});
    MoveWeights move = description(c, w.data(), u.data(), scalars.data(), applies.data());
    move.scales = scales.data() + 1;
    move.scale_stride = 2;
    move.scale = 64;  // of all matrices
    move_weights(move, 0, stream_);
    ASSERT_EQ(synchronise(), 0) << found();
    std::vector<float> wanted = c.w;
    const std::vector<float> all = scales.values();
    c.for_each([&](std::size_t at_w, std::size_t at_u, std::int64_t b) {
      const float factor = kFactor * move.scale * all[static_cast<std::size_t>(2 * b + 1)];
      const float added = factor * wide(c.u[at_u], c.half);
      const float kept = kDecay * c.w[at_w];
      wanted[at_w] = kept + added;
    });
    expect_same(w.values(), wanted);
  }
}

TEST_F(MoveWeightsTest, FindsEntriesFarApart) {
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 8;
  Reserved<float> w(kFar + 4);
  Reserved<std::uint16_t> u(kFar + 4);
  if (w.data() == nullptr || u.data() == nullptr) GTEST_SKIP() << "there is no memory of 13 GB";
  const OnGpu<std::uint8_t> applies({1});
  const OnGpu<float> one({1});
  const Shape shapes[] = {{1, 2, 4, kFar, 0, kFar, 0},
                          {2, 1, 4, 4, kFar, 4, kFar},
                          {2, 1, 4, 4, 0, 4, 0, 2, kFar, kFar}};
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(&shape - &shapes[0]);
    Case c({1, 1, 1, 1, 0, 1, 0}, Half::kFp16);
    c.shape = shape;
    MoveWeights move = description(c, w.data(), u.data(), one.data(), applies.data());
    move.decay = move.factor = one.data();
    w.set(0, {1, 2, 3, 4});
    w.set(kFar, {5, 6, 7, 8});
    u.set(0, std::vector<std::uint16_t>(4, machine::f16_of(1)));
    u.set(kFar, std::vector<std::uint16_t>(4, machine::f16_of(2)));
    move_weights(move, 0, stream_);
    ASSERT_EQ(synchronise(), 0) << found();
    EXPECT_EQ(w.values(0, 4), (std::vector<float>{2, 3, 4, 5}));
    EXPECT_EQ(w.values(kFar, 4), (std::vector<float>{7, 8, 9, 10}));
  }
}

TEST_F(MoveWeightsTest, TakesTheLargestMatrix) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 4 * kMoveWeightsThreads;
  Reserved<float> w(kMost);
  Reserved<std::uint16_t> u(kMost);
  if (w.data() == nullptr || u.data() == nullptr) GTEST_SKIP() << "there is no memory of 13 GB";
  const OnGpu<std::uint8_t> applies({1});
  const OnGpu<float> one({1});
  for (const int width : {4, 1}) {
    SCOPED_TRACE(width);
    w.set(kMost - 2, {1, 2});
    u.set(kMost - 2, std::vector<std::uint16_t>(2, machine::f16_of(1)));
    only_block((kMost - 1) / (4 * kMoveWeightsThreads));
    move_weights({.rows = 1,
                  .cols = kMost,
                  .w = w.data(),
                  .w_batch_stride = width,
                  .u = u.data(),
                  .decay = one.data(),
                  .factor = one.data(),
                  .applies = applies.data()},
                 0, stream_);
    ASSERT_EQ(synchronise(), 0) << found();
    EXPECT_EQ(w.values(kMost - 2, 2), (std::vector<float>{2, 3}));
  }
}

TEST_F(MoveWeightsTest, RoundsEachOperation) {
  // With a fused multiply-add the sum would be 2^-24, not 0.
  Case c({1, 1, 1, 1, 0, 1, 0}, Half::kFp16);
  c.w[0] = 1 + 0x1p-12F;
  c.u[0] = machine::f16_of(-1);
  const OnGpu<std::uint8_t> applies({1});
  const OnGpu<float> scalars({1 + 0x1p-12F, (1 + 0x1p-12F) * c.w[0]});
  const OnGpu<float> w(c.w);
  const OnGpu<std::uint16_t> u(c.u);
  MoveWeights move = description(c, w.data(), u.data(), scalars.data(), applies.data());
  move_weights(move, 0, stream_);
  EXPECT_EQ(synchronise(), 0);
  EXPECT_EQ(w.values()[0], 0);
}

TEST_F(MoveWeightsTest, ConvertsEveryHalf) {
  for (const Half half : {Half::kFp16, Half::kBFloat16}) {
    Case c({1, 256, 256, 256, 0, 256, 0}, half);
    for (std::size_t i = 0; i < c.u.size(); ++i) c.u[i] = static_cast<std::uint16_t>(i);
    for (float& w : c.w) w = 0;
    const OnGpu<std::uint8_t> applies({1});
    const OnGpu<float> one({1});
    const OnGpu<float> w(c.w);
    const OnGpu<std::uint16_t> u(c.u);
    MoveWeights move = description(c, w.data(), u.data(), one.data(), applies.data());
    move.factor = move.decay = one.data();
    move_weights(move, 0, stream_);
    ASSERT_EQ(synchronise(), 0) << found();
    expect_same(w.values(), c.expected(1, 1));
  }
}

TEST_F(MoveWeightsTest, ChangesNoBitWhereItDoesNotApply) {
  Case c({2, 21, 33, 33, 693, 40, 840}, Half::kBFloat16);
  c.w[5] = std::bit_cast<float>(0x7fa00001U);  // a NaN whose bits arithmetic would change
  const OnGpu<std::uint8_t> applies({0});
  const OnGpu<float> scalars({kDecay, kFactor});
  const OnGpu<float> w(c.w);
  const OnGpu<std::uint16_t> u(c.u);
  move_weights(description(c, w.data(), u.data(), scalars.data(), applies.data()), 0, stream_);
  ASSERT_EQ(synchronise(), 0);
  const auto got = w.values();
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(c.w[i]));
  }
}

TEST_F(MoveWeightsTest, MovesTenBytesAnEntry) {
  auto* const counts = driver_function<FakeCounts()>("fake_cuda_counts");
  if (counts == nullptr) GTEST_SKIP() << "a GPU's driver does not count";
  counts();
  const Case c({2, 8, 64, 64, 512, 64, 512}, Half::kFp16);
  const OnGpu<std::uint8_t> applies({1});
  const OnGpu<float> scalars({kDecay, kFactor});
  const OnGpu<float> w(c.w);
  const OnGpu<std::uint16_t> u(c.u);
  move_weights(description(c, w.data(), u.data(), scalars.data(), applies.data()), 0, stream_);
  ASSERT_EQ(synchronise(), 0);
  const FakeCounts found = counts();
  EXPECT_EQ(found.launches, 1U);
  EXPECT_EQ(found.bytes_read, 1024U * 6 + 1 + 8);
  EXPECT_EQ(found.bytes_written, 1024U * 4);
}

TEST_F(MoveWeightsTest, RefusesBadDescriptions) {
  const Case c({1, 4, 4, 4, 0, 4, 0}, Half::kFp16);
  const OnGpu<std::uint8_t> applies({1});
  const OnGpu<float> scalars({kDecay, kFactor});
  const OnGpu<float> w(c.w);
  const OnGpu<std::uint16_t> u(c.u);
  const MoveWeights good = description(c, w.data(), u.data(), scalars.data(), applies.data());
  const auto refuses = [&](auto change, const std::string& word) {
    MoveWeights bad = good;
    change(bad);
    try {
      move_weights(bad, 0, stream_);
      ADD_FAILURE() << "accepts " << word;
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refuses([](MoveWeights& m) { m.batch = 65536; }, "batch");
  refuses([](MoveWeights& m) { m.inner_batch = 0; }, "inner_batch");
  refuses([](MoveWeights& m) { m.rows = -1; }, "rows");
  refuses([](MoveWeights& m) { m.rows = m.cols = 50000; }, "entries");
  refuses([](MoveWeights& m) { m.rows = 1, m.cols = 0x7fffff01; }, "entries");
  refuses([](MoveWeights& m) { m.w = nullptr; }, "w must be an address");
  refuses([](MoveWeights& m) { m.u = static_cast<const char*>(m.u) + 1; }, "u must be an address");
  refuses([](MoveWeights& m) { m.u_row_stride = -4; }, "strides of u");
  refuses([](MoveWeights& m) { m.applies = nullptr; }, "applies");
  refuses([](MoveWeights& m) { m.decay = nullptr; }, "decay must be an address");
  refuses([](MoveWeights& m) { m.factor = nullptr; }, "factor must be an address");
  refuses([](MoveWeights& m) { m.scales = m.w, m.scale_stride = -1; }, "strides of scales");
  MoveWeights empty = good;
  empty.rows = 0;
  empty.w = nullptr;
  move_weights(empty, 0, stream_);  // nothing to do
  EXPECT_EQ(synchronise(), 0);
}

TEST_F(MoveWeightsTest, OnADescriptionBeyondTheMemoryTheFakeDriverReportsAnIllegalAddress) {
  if (driver_function<void()>("fake_cuda_errors") == nullptr) GTEST_SKIP() << "costs the context";
  const Case c({1, 4, 4, 4, 0, 4, 0}, Half::kFp16);
  const OnGpu<std::uint8_t> applies({1});
  const OnGpu<float> scalars({kDecay, kFactor});
  const OnGpu<float> w(c.w);
  const OnGpu<std::uint16_t> u(c.u);
  MoveWeights bad = description(c, w.data(), u.data(), scalars.data(), applies.data());
  bad.rows = 60;
  move_weights(bad, 0, stream_);
  EXPECT_EQ(synchronise(), 700);
  EXPECT_NE(found().find("w lies outside the device's memory"), std::string::npos);
  bad = description(c, const_cast<float*>(c.w.data()), u.data(), scalars.data(),
                    applies.data());  // the host's
  move_weights(bad, 0, stream_);
  EXPECT_EQ(synchronise(), 700);
  EXPECT_NE(found().find("w lies outside the device's memory"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
