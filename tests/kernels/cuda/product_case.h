#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "dmuon/kernels/cuda/library.h"
#include "dmuon/kernels/cuda/product.h"
#include "tests/kernels/cuda/emulator/machine_emulated.h"
#include "tests/kernels/cuda/gpu.h"

// Symmetric products on the device against plain loops, for the tests of their kernels.
namespace dmuon::kernels::cuda {

inline constexpr std::uint16_t kNan = 0x7fff;  // in both formats

inline std::uint16_t narrow(double v, Half format) {
  const auto single = static_cast<float>(v);
  return format == Half::kFp16 ? machine::f16_of(single) : machine::bf16_of(single);
}
inline double wide(std::uint16_t v, Half format) {
  using emulator::Narrow;
  return emulator::wide_values(format == Half::kFp16 ? Narrow::kF16 : Narrow::kBF16)[v];
}

inline std::size_t at(std::int64_t row_stride, std::int64_t rows, std::int64_t z, std::int64_t i,
                      std::int64_t j) {
  return static_cast<std::size_t>((z * rows + i) * row_stride + j);
}

struct Shape {
  std::int64_t batch, m, inner;
  bool adds;     // c, the diagonal and the device's scale
  bool other_b;  // b is not a; then a b' is not symmetric, and its lower triangle counts
  std::int64_t a_padding = 8;
  bool transposed = false;    // a and b are [inner, m]
  bool with_diagonal = true;  // if adds

  double diagonal() const { return adds && with_diagonal ? 0.375 : 0; }
  std::int64_t a_rows() const { return transposed ? inner : m; }
  std::int64_t a_cols() const { return transposed ? m : inner; }
  std::int64_t a_stride() const { return (a_cols() + 7) / 8 * 8 + a_padding; }
  std::int64_t b_stride() const { return other_b ? a_stride() + 16 : a_stride(); }
  std::int64_t c_stride() const { return (m + 7) / 8 * 8 + 8; }
  std::int64_t out_stride() const { return (m + 7) / 8 * 8; }
};

// Operands with NaN in their paddings and above the diagonal of c.
struct Case {
  Case(const Shape& of, Half half) : shape(of), format(half) {
    std::mt19937 random(7);
    std::normal_distribution<double> normal;
    const auto fill = [&](std::int64_t rows, std::int64_t row_stride, auto cols_of_row) {
      std::vector<std::uint16_t> x(static_cast<std::size_t>(of.batch * rows * row_stride), kNan);
      for (std::int64_t z = 0; z < of.batch; ++z)
        for (std::int64_t i = 0; i < rows; ++i)
          for (std::int64_t j = 0; j < cols_of_row(i); ++j)
            x[at(row_stride, rows, z, i, j)] = narrow(normal(random), half);
      return x;
    };
    const auto all = [&](std::int64_t) { return of.a_cols(); };
    a = fill(of.a_rows(), of.a_stride(), all);
    b = of.other_b ? fill(of.a_rows(), of.b_stride(), all) : a;
    const auto lower = [](std::int64_t row) { return row + 1; };
    c = fill(of.m, of.c_stride(), lower);
    for (std::int64_t z = 0; z < of.batch; ++z) scale.push_back(0.25F * static_cast<float>(z + 1));
  }

  Product describe() const {
    Product product;
    product.batch = shape.batch;
    product.m = shape.m;
    product.inner = shape.inner;
    product.format = format;
    product.a_transposed = product.b_transposed = shape.transposed;
    product.alpha = 0.5;
    product.beta = shape.adds ? -0.75 : 0;
    product.diagonal = shape.diagonal();
    return product;
  }

  /// a or b as [batch, m, inner].
  std::vector<double> straight(const std::vector<std::uint16_t>& x, std::int64_t stride) const {
    const Shape& s = shape;
    std::vector<double> all;
    for (std::int64_t z = 0; z < s.batch; ++z) {
      for (std::int64_t i = 0; i < s.m; ++i) {
        for (std::int64_t k = 0; k < s.inner; ++k) {
          const std::int64_t row = s.transposed ? k : i;
          all.push_back(wide(x[at(stride, s.a_rows(), z, row, s.transposed ? i : k)], format));
        }
      }
    }
    return all;
  }

  Shape shape;
  Half format;
  std::vector<std::uint16_t> a, b, c;
  std::vector<float> scale;
};

using Entries = std::vector<std::uint16_t>;

class SymmetricTest : public GpuTest {
 protected:
  // Runs the product, of the whole batch or of one matrix.
  Entries run(const Case& one, const ProductChoice& choice, int only = -1) {
    const Shape& s = one.shape;
    const std::int64_t first = only < 0 ? 0 : only;
    Product product = one.describe();
    if (only >= 0) product.batch = 1;
    const OnGpu<std::uint16_t> a(one.a);
    const OnGpu<std::uint16_t> b(one.b);
    const OnGpu<std::uint16_t> c(one.c);
    const OnGpu<float> scale(one.scale);
    const auto size = static_cast<std::size_t>(product.batch * s.m * s.out_stride());
    const OnGpu<std::uint16_t> out(Entries(size, kNan));
    const auto words = static_cast<std::size_t>(workspace_bytes(product, choice, 0) / 4);
    const OnGpu<float> workspace(
        std::vector<float>(words, std::numeric_limits<float>::quiet_NaN()));
    const auto tickets = static_cast<std::size_t>(num_tickets(product, choice, 0));
    const OnGpu<std::uint32_t> zeros(std::vector<std::uint32_t>(tickets, 0));
    const std::int64_t a_size = s.a_rows() * s.a_stride();
    const std::int64_t b_size = s.a_rows() * s.b_stride();
    const std::int64_t c_size = s.m * s.c_stride();
    product.a = {a.data() + first * a_size, s.a_stride(), a_size};
    product.b = s.other_b ? Matrices{b.data() + first * b_size, s.b_stride(), b_size} : product.a;
    if (s.adds) product.c = {c.data() + first * c_size, s.c_stride(), c_size};
    if (s.adds) product.scale = scale.data() + first;
    product.out = out.data();
    product.out_row_stride = s.out_stride();
    product.out_batch_stride = s.m * s.out_stride();
    compute(product, choice, workspace.data(), zeros.data(), 0, stream_);
    EXPECT_EQ(synchronise(), 0) << found();
    EXPECT_EQ(zeros.values(), std::vector<std::uint32_t>(tickets, 0));
    return out.values();
  }

  // Compares with sums in fp64, in units of what rounding may cost; bits with the mirror image; and
  // the padding.
  static void expect_product(const Case& one, const Entries& got) {
    const Shape& s = one.shape;
    const auto a = one.straight(one.a, s.a_stride());
    const auto b = one.straight(one.b, s.b_stride());
    const double rounding = one.format == Half::kFp16 ? 0x1p-11 : 0x1p-8;
    double worst = 0;
    std::int64_t asymmetric = 0;
    std::int64_t touched = 0;
    for (std::int64_t z = 0; z < s.batch; ++z) {
      const double alpha = 0.5 * (s.adds ? one.scale[static_cast<std::size_t>(z)] : 1);
      for (std::int64_t i = 0; i < s.m; ++i) {
        const double* const a_row = a.data() + (z * s.m + i) * s.inner;
        for (std::int64_t j = 0; j <= i; ++j) {
          const double* const b_row = b.data() + (z * s.m + j) * s.inner;
          double sum = 0;
          double size = 0;
          for (std::int64_t k = 0; k < s.inner; ++k) {
            sum += alpha * a_row[k] * b_row[k];
            size += std::abs(alpha * a_row[k] * b_row[k]);
          }
          if (s.adds) {
            const std::uint16_t c = one.c[at(s.c_stride(), s.m, z, i, j)];
            sum += -0.75 * wide(c, one.format) + (i == j ? s.diagonal() : 0);
          }
          const std::uint16_t lower = got[at(s.out_stride(), s.m, z, i, j)];
          const double error = std::abs(wide(lower, one.format) - sum);
          const double allowed = rounding * std::abs(sum) + 0x1p-20 * (size + 1);
          if (!(error <= worst * allowed)) worst = error / allowed;
          asymmetric += lower != got[at(s.out_stride(), s.m, z, j, i)];
        }
        for (std::int64_t j = s.m; j < s.out_stride(); ++j)
          touched += got[at(s.out_stride(), s.m, z, i, j)] != kNan;
      }
    }
    EXPECT_LE(worst, 1.01);
    EXPECT_EQ(asymmetric, 0);
    EXPECT_EQ(touched, 0);
  }

  void expect_all(const Shape& shape, const std::vector<ProductChoice>& choices) {
    for (const Half format : {Half::kFp16, Half::kBFloat16}) {
      const Case one(shape, format);
      for (const ProductChoice& choice : choices) {
        SCOPED_TRACE(testing::Message() << shape.batch << " of " << shape.m << " x " << shape.inner
                                        << ", " << choice.kernel << " in " << choice.splits
                                        << ", format " << static_cast<int>(format));
        seed(++order_);
        expect_product(one, run(one, choice));
      }
    }
  }

  // A batch has the bits of its matrices, in every order of blocks.
  void expect_same_bits(const Case& one, const ProductChoice& choice) {
    SCOPED_TRACE(choice.kernel);
    seed(1);
    const Entries together = run(one, choice);
    for (unsigned order = 2; order <= 4; ++order) {
      seed(order);
      EXPECT_TRUE(run(one, choice) == together);
    }
    const Entries alone = run(one, choice, 1);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(),
                           together.begin() + static_cast<std::ptrdiff_t>(alone.size())));
  }

  // fp16 would hide the order of sums of usual sizes. Here the parts are 2^24, 1 and -2^24, and an
  // order that begins with the first and the last one finds 1, the right one 0.
  void expect_parts_in_their_order(const ProductChoice& choice) {
    Case one({1, 8, 3 * 64, false, true}, Half::kFp16);
    std::ranges::fill(one.a, std::uint16_t{0});
    std::ranges::fill(one.b, std::uint16_t{0});
    for (std::int64_t i = 0; i < 8; ++i) {
      const auto set = [&](std::int64_t k, double of_a, double of_b) {
        one.a[at(one.shape.a_stride(), 8, 0, i, k)] = narrow(of_a, one.format);
        one.b[at(one.shape.b_stride(), 8, 0, i, k)] = narrow(of_b, one.format);
      };
      set(0, 4096, 4096);
      set(64, 1, 1);
      set(128, -4096, 4096);
    }
    for (unsigned order = 1; order <= 12; ++order) {
      seed(order);
      EXPECT_EQ(run(one, choice)[0], 0) << order;
    }
  }

  void expect_replays(const ProductChoice& choice) {
    const Case one({1, 39, 200, false, false}, Half::kFp16);
    const OnGpu<std::uint16_t> a(one.a);
    OnGpu<std::uint16_t> out(Entries(39 * 40, kNan));
    Product product = one.describe();
    product.a = product.b = {a.data(), one.shape.a_stride(), 0};
    product.out = out.data();
    product.out_row_stride = 40;
    const OnGpu<float> workspace(
        std::vector<float>(static_cast<std::size_t>(workspace_bytes(product, choice, 0) / 4)));
    const OnGpu<std::uint32_t> tickets(std::vector<std::uint32_t>(2, 0));
    prepare(0);
    ASSERT_EQ(call("cuStreamBeginCapture_v2", stream_, 0), 0);
    compute(product, choice, workspace.data(), tickets.data(), 0, stream_);
    const CapturedGraph graph(stream_);
    for (int i = 0; i < 2; ++i) {
      out.set(Entries(39 * 40, kNan));
      graph.launch();
      ASSERT_EQ(synchronise(), 0);
      expect_product(one, out.values());
    }
  }

  unsigned order_ = 0;
};

}  // namespace dmuon::kernels::cuda
