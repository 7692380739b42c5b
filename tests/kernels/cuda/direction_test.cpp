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
  std::int64_t row_stride, inner_batch, inner_stride, batch_stride;
  std::int64_t x_rows, x_cols;

  std::size_t at(std::int64_t b, std::int64_t i, std::int64_t j) const {
    return static_cast<std::size_t>(b / inner_batch * batch_stride +
                                    b % inner_batch * inner_stride + i * row_stride + j);
  }
  std::size_t span() const {
    std::size_t most = 0;
    for (std::int64_t b = 0; b < batch; ++b) most = std::max(most, at(b, rows - 1, cols - 1) + 1);
    return most;
  }
  std::size_t x_at(std::int64_t b, std::int64_t i, std::int64_t j) const {
    return static_cast<std::size_t>((b * x_rows + i) * x_cols + j);
  }
  std::size_t x_size() const { return static_cast<std::size_t>(batch * x_rows * x_cols); }
};

Shape contiguous(std::int64_t batch, std::int64_t rows, std::int64_t cols) {
  const auto up = [](std::int64_t side) { return (side + 7) / 8 * 8; };
  return {batch, rows, cols, cols, 1, 0, rows * cols, up(rows), up(cols)};
}

struct Step {
  Half format = Half::kFp16;
  double mu = 0.95;
  bool nesterov = true;
  bool applies = true;
  float factor = 1;
  double eps = 1e-7;
};

struct Result {
  std::vector<float> momentum;
  std::vector<std::uint16_t> x;
  std::vector<float> scale;  // of each matrix
  std::vector<double> inverse;
};

// By torch.lerp's rule, entry by entry, and with all of the direction at hand.
Result expected(const Shape& shape, const Step& step, const std::vector<float>& gradient,
                const std::vector<float>& momentum) {
  Result result{momentum, std::vector<std::uint16_t>(shape.x_size()), {}, {}};
  const auto lerp = [](float from, float to, float weight) {
    return weight < 0.5F ? std::fma(weight, to - from, from) : std::fma(weight - 1, to - from, to);
  };
  const auto rest = static_cast<float>(1 - step.mu);
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    std::vector<float> direction;
    for (std::int64_t i = 0; i < shape.rows; ++i) {
      for (std::int64_t j = 0; j < shape.cols; ++j) {
        const std::size_t at = shape.at(b, i, j);
        const float to = step.applies ? step.factor * gradient[at] : momentum[at];
        const float moved = lerp(momentum[at], to, rest);
        if (step.applies) result.momentum[at] = moved;
        direction.push_back(step.nesterov ? lerp(moved, to, rest) : moved);
      }
    }
    float largest = 0;
    double squares = 0;
    for (const float d : direction) {
      largest = std::max(largest, std::abs(d));
      squares += static_cast<double>(d) * d;
    }
    int exponent = 0;
    if (largest > 0) exponent = std::clamp(14 - std::max(std::ilogb(largest), -127), -126, 127);
    const float scale = std::ldexp(1.F, exponent);
    result.scale.push_back(scale);
    result.inverse.push_back(squares == 0 ? 1 : 1 / std::max(std::sqrt(squares), step.eps) / scale);
    for (std::int64_t i = 0; i < shape.rows; ++i) {
      for (std::int64_t j = 0; j < shape.cols; ++j) {
        const float entry = scale * direction[static_cast<std::size_t>(i * shape.cols + j)];
        result.x[shape.x_at(b, i, j)] =
            step.format == Half::kFp16 ? machine::f16_of(entry) : machine::bf16_of(entry);
      }
    }
  }
  return result;
}

// Entries of a shape; what lies between them is NaN.
std::vector<float> random(const Shape& shape, unsigned seed, float size = 1) {
  std::vector<float> values(shape.span(), kNan);
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t b = 0; b < shape.batch; ++b)
    for (std::int64_t i = 0; i < shape.rows; ++i)
      for (std::int64_t j = 0; j < shape.cols; ++j)
        values[shape.at(b, i, j)] = size * normal(generator);
  return values;
}

class DirectionTest : public GpuTest {
 protected:
  // Runs a step on the device. The memo comes from the step before, or is zeros.
  Result run(const Shape& shape, const Step& step, const std::vector<float>& gradient,
             const std::vector<float>& momentum, std::vector<float>* memo = nullptr) {
    const auto batch = static_cast<std::size_t>(shape.batch);
    const OnGpu<float> g(gradient);
    const OnGpu<float> m(momentum);
    const OnGpu<std::uint16_t> x(std::vector<std::uint16_t>(shape.x_size(), 0x7fff));
    const OnGpu<float> memos(
        memo != nullptr && !memo->empty() ? *memo : std::vector<float>(batch * kMemoWords));
    const OnGpu<float> factor({step.factor});
    const OnGpu<std::uint8_t> applies({static_cast<std::uint8_t>(step.applies)});
    const OnGpu<float> rest({static_cast<float>(1 - step.mu)});
    const OnGpu<float> squares(std::vector<float>(batch, 7));
    DirectionOf description = describe(shape, step);
    const OnGpu<float> partial(
        std::vector<float>(static_cast<std::size_t>(partial_words(description)), kNan));
    description.gradient = g.data();
    description.momentum = m.data();
    description.x = x.data();
    description.memo = memos.data();
    description.partial = partial.data();
    description.squares = squares.data();
    description.rest = rest.data();
    description.gradient_factor = step.factor == 1 ? nullptr : factor.data();
    description.applies = applies.data();
    direction(description, 0, stream_);
    EXPECT_EQ(synchronise(), 0) << found();
    Result result{m.values(), x.values(), {}, {}};
    const std::vector<float> words = memos.values();
    for (std::size_t b = 0; b < batch; ++b) {
      const float* const of_matrix = words.data() + b * kMemoWords;
      result.scale.push_back(of_matrix[kMemoScale]);
      result.inverse.push_back(of_matrix[kMemoInverse]);
      const float square = of_matrix[kMemoInverse] * of_matrix[kMemoInverse];
      EXPECT_TRUE(squares.values()[b] == square || std::isnan(square));
      EXPECT_EQ(of_matrix[kMemoGuess], of_matrix[kMemoScale]);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(of_matrix[kMemoTicket]), 0U);
    }
    if (memo != nullptr) *memo = words;
    return result;
  }

  static DirectionOf describe(const Shape& shape, const Step& step) {
    DirectionOf description;
    description.batch = shape.batch;
    description.rows = shape.rows;
    description.cols = shape.cols;
    description.row_stride = shape.row_stride;
    description.inner_batch = shape.inner_batch;
    description.inner_stride = shape.inner_stride;
    description.batch_stride = shape.batch_stride;
    description.x_format = step.format;
    description.x_rows = shape.x_rows;
    description.x_cols = shape.x_cols;
    description.nesterov = step.nesterov;
    description.eps = step.eps;
    return description;
  }

  static void expect_equal(const Result& got, const Result& wanted) {
    std::size_t differ = 0;
    for (std::size_t i = 0; i < wanted.momentum.size(); ++i) {
      const bool both_nan = std::isnan(got.momentum[i]) && std::isnan(wanted.momentum[i]);
      differ += both_nan || got.momentum[i] == wanted.momentum[i] ? 0 : 1;
    }
    EXPECT_EQ(differ, 0U) << "entries of the momentum";
    EXPECT_EQ(got.scale, wanted.scale);
    EXPECT_TRUE(got.x == wanted.x);
    for (std::size_t b = 0; b < wanted.inverse.size(); ++b)
      EXPECT_NEAR(got.inverse[b] / wanted.inverse[b], 1, 1e-6) << "matrix " << b;
  }
};

TEST_F(DirectionTest, HasTheBitsOfAPlainLoop) {
  const Shape shapes[] = {
      contiguous(1, 1, 1),
      contiguous(1, 1, 7),
      contiguous(2, 37, 61),                    // odd
      contiguous(1, 129, 64),                   // a block and a part of one
      contiguous(3, 40, 256),                   // two blocks each
      contiguous(1, 3, 9000),                   // rows longer than a block
      {2, 9, 30, 44, 1, 0, 9 * 44 + 4, 9, 32},  // rows apart; in fours
      {2, 5, 8, 13, 1, 0, 5 * 13, 8, 8},        // rows of fours, not aligned
      {6, 16, 10, 30, 3, 10, 16 * 30, 16, 16},  // blocks of columns of 2 matrices
      {4, 16, 32, 64, 2, 32, 16 * 64, 16, 32},  // and aligned
  };
  const Step steps[] = {
      {},          {.nesterov = false}, {.format = Half::kBFloat16, .factor = 0.37F},
      {.mu = 0.3},  // from the other end
      {.mu = 0.5}, {.applies = false},  {.nesterov = false, .applies = false, .factor = 2},
  };
  unsigned order = 0;
  for (const Shape& shape : shapes) {
    for (const Step& step : steps) {
      SCOPED_TRACE(testing::Message() << shape.batch << " x " << shape.rows << " x " << shape.cols
                                      << ", step " << &step - &steps[0]);
      seed(++order);
      const std::vector<float> gradient = random(shape, 1);
      const std::vector<float> momentum = random(shape, 2, 0.2F);
      const Result wanted = expected(shape, step, gradient, momentum);
      std::vector<float> memo;
      expect_equal(run(shape, step, gradient, momentum, &memo), wanted);
      // Now the guess is right, and the result the same.
      expect_equal(run(shape, step, gradient, momentum, &memo), wanted);
      // As it is by any other guess.
      for (std::size_t b = 0; b < memo.size(); b += kMemoWords) memo[b + kMemoGuess] = 0x1p100F;
      expect_equal(run(shape, step, gradient, momentum, &memo), wanted);
    }
  }
}

TEST_F(DirectionTest, WritesAllPartsAnewByFewBlocks) {
  // The second kernel has a block for each of so many matrices, and each matrix two parts.
  const Shape shape = contiguous(133, 1, 1032);
  const std::vector<float> gradient = random(shape, 1);
  const std::vector<float> momentum = random(shape, 2, 0.2F);
  expect_equal(run(shape, {}, gradient, momentum), expected(shape, {}, gradient, momentum));
}

TEST_F(DirectionTest, HoldsEntriesOfAnySize) {
  const Shape shape = contiguous(1, 24, 40);
  std::vector<float> memo;  // of a step of quite another size
  for (const float size : {1e-38F, 1e-30F, 1e-10F, 1e10F, 1e30F, 1e37F}) {
    SCOPED_TRACE(size);
    const std::vector<float> gradient = random(shape, 3, size);
    const std::vector<float> momentum = random(shape, 4, size);
    // In fp32 the squares of scaled entries hold the norm, whatever the entries' size.
    expect_equal(run(shape, {}, gradient, momentum, &memo),
                 expected(shape, {}, gradient, momentum));
  }
}

TEST_F(DirectionTest, KeepsAZeroMatrixZeroAndShowsWhatIsNotFinite) {
  const Shape shape = contiguous(3, 16, 16);
  std::vector<float> gradient = random(shape, 5);
  std::vector<float> momentum = random(shape, 6);
  for (std::size_t i = 0; i < 256; ++i) gradient[i] = momentum[i] = 0;
  gradient[shape.at(1, 3, 4)] = kNan;
  gradient[shape.at(2, 3, 4)] = std::numeric_limits<float>::infinity();
  for (const double eps : {1e-7, 0.}) {
    SCOPED_TRACE(eps);
    const Result got = run(shape, {.eps = eps}, gradient, momentum);
    for (std::size_t i = 0; i < 256; ++i) EXPECT_EQ(got.x[i], 0);
    EXPECT_EQ(got.inverse[0], 1);
    EXPECT_TRUE(std::isnan(got.inverse[1]));
    const float bad = machine::float_of_f16(got.x[shape.x_at(2, 3, 4)]);
    EXPECT_TRUE(std::isnan(bad * static_cast<float>(got.inverse[2])));
  }
}

TEST_F(DirectionTest, FindsEntriesFarApart) {
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 8;
  Reserved<float> g(kFar + 4);
  Reserved<float> m(kFar + 4);
  if (g.data() == nullptr || m.data() == nullptr) GTEST_SKIP() << "there is no memory of 17 GB";
  const OnGpu<std::uint8_t> applies({1});
  const OnGpu<std::uint16_t> x(std::vector<std::uint16_t>(64));
  const OnGpu<float> partial(std::vector<float>(4));
  const Shape shapes[] = {
      {1, 2, 4, kFar, 1, 0, 0, 4, 8},
      {2, 1, 4, 4, 2, kFar, 0, 4, 8},
      {2, 1, 4, 4, 1, 0, kFar, 4, 8},
  };
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(&shape - &shapes[0]);
    const OnGpu<float> memo(std::vector<float>(2 * kMemoWords));
    for (const std::int64_t at : {std::int64_t{0}, kFar}) {
      g.set(at, {1, 2, 3, 4});
      m.set(at, {3, 4, 5, 6});
    }
    const OnGpu<float> rest({0.5});
    DirectionOf description = describe(shape, {});
    description.rest = rest.data();
    description.gradient = g.data();
    description.momentum = m.data();
    description.x = x.data();
    description.memo = memo.data();
    description.partial = partial.data();
    description.applies = applies.data();
    direction(description, 0, stream_);
    ASSERT_EQ(synchronise(), 0) << found();
    for (const std::int64_t at : {std::int64_t{0}, kFar})
      EXPECT_EQ(m.values(at, 4), (std::vector<float>{2, 3, 4, 5}));
  }
}

TEST_F(DirectionTest, WritesXFarFromItsBeginning) {
  // The last of three matrices of one row, whose x has 2^30 + 8 entries each.
  constexpr std::int64_t kCols = (std::int64_t{1} << 30) + 8;
  const Shape shape{3, 1, 4, 4, 1, 0, 4, 1, kCols};
  const OnGpu<float> g({16384, 0, 0, 0, 16384, 0, 0, 0, 16384, 0, 0, 0});
  const OnGpu<float> m(std::vector<float>(12));
  const OnGpu<std::uint8_t> applies({0});
  const OnGpu<float> memo(std::vector<float>(3 * kMemoWords));
  Reserved<std::uint16_t> x(3 * kCols);
  const OnGpu<float> rest({0.05F});
  DirectionOf description = describe(shape, {});
  description.rest = rest.data();
  const OnGpu<float> partial(
      std::vector<float>(static_cast<std::size_t>(partial_words(description))));
  if (x.data() == nullptr) GTEST_SKIP() << "there is no memory of 6 GB";
  description.gradient = m.data();
  description.momentum = g.data();
  description.x = x.data();
  description.memo = memo.data();
  description.partial = partial.data();
  description.applies = applies.data();
  only_block(2 * (partial_words(description) / 6));
  direction(description, 0, stream_);
  ASSERT_EQ(synchronise(), 0) << found();
  // Its scale is 1.
  EXPECT_EQ(x.values(2 * kCols, 2), (std::vector<std::uint16_t>{machine::f16_of(16384), 0}));
}

TEST_F(DirectionTest, OfAMatrixHasTheSameBitsAloneAndInABatch) {
  const Shape all = contiguous(5, 70, 130);
  const Shape one = contiguous(1, 70, 130);
  const std::vector<float> gradient = random(all, 7);
  const std::vector<float> momentum = random(all, 8);
  seed(9);
  const Result together = run(all, {}, gradient, momentum);
  const auto of = [&](const std::vector<float>& values) {
    return std::vector<float>(values.begin() + 3 * 70 * 130, values.begin() + 4 * 70 * 130);
  };
  seed(10);
  const Result alone = run(one, {}, of(gradient), of(momentum));
  EXPECT_EQ(of(together.momentum), alone.momentum);
  EXPECT_EQ(together.inverse[3], alone.inverse[0]);
  EXPECT_TRUE(std::equal(alone.x.begin(), alone.x.end(), together.x.begin() + 3 * 72 * 136));
}

TEST_F(DirectionTest, MovesFourteenBytesAnEntryIfItGuessesRight) {
  auto* const counts = driver_function<FakeCounts()>("fake_cuda_counts");
  if (counts == nullptr) GTEST_SKIP() << "a GPU's driver does not count";
  const Shape shape = contiguous(2, 64, 128);
  const std::vector<float> gradient = random(shape, 11);
  const std::vector<float> momentum = random(shape, 12);
  std::vector<float> memo;
  run(shape, {}, gradient, momentum, &memo);
  counts();
  run(shape, {}, gradient, momentum, &memo);
  const FakeCounts found = counts();
  EXPECT_EQ(found.launches, 2U);
  const double moved = static_cast<double>(found.bytes_read + found.bytes_written);
  EXPECT_NEAR(moved / static_cast<double>(shape.span()), 14, 0.02);
}

TEST_F(DirectionTest, RefusesBadDescriptions) {
  const Shape shape = contiguous(1, 8, 8);
  const OnGpu<float> values(std::vector<float>(64));
  const auto refuses = [&](auto change, const std::string& word) {
    DirectionOf bad = describe(shape, {});
    bad.gradient = bad.momentum = bad.memo = bad.partial = values.data();
    bad.rest = values.data();
    bad.x = values.data();
    bad.applies = reinterpret_cast<const std::uint8_t*>(values.data());
    change(bad);
    try {
      direction(bad, 0, stream_);
      ADD_FAILURE() << "accepts " << word;
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refuses([](DirectionOf& d) { d.batch = 70000; }, "batch");
  refuses([](DirectionOf& d) { d.x_cols = 6; }, "x_cols");
  refuses([](DirectionOf& d) { d.x_rows = 7; }, "x_rows");
  refuses([](DirectionOf& d) { d.inner_batch = 0; }, "inner_batch");
  refuses([](DirectionOf& d) { d.memo = nullptr; }, "memo must be an address");
  refuses([](DirectionOf& d) { d.rest = nullptr; }, "rest must be an address");
  refuses([](DirectionOf& d) { d.row_stride = -1; }, "strides of gradient");
}

}  // namespace
}  // namespace dmuon::kernels::cuda
