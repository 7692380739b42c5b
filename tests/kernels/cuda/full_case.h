#pragma once

#include <utility>

#include "dmuon/kernels/cuda/elementwise.h"
#include "tests/kernels/cuda/product_case.h"

// Full products on the device against plain loops, for the tests of their kernels.
namespace dmuon::kernels::cuda {

struct FullShape {
  std::int64_t batch, m, n, inner;
  bool b_transposed;  // b is [inner, n], as X in Q X; else [n, inner], as Q in X Q
  bool adds;          // c and the device's scale
  std::int64_t padding = 8;

  static std::int64_t aligned(std::int64_t cols) { return (cols + 7) / 8 * 8; }
  std::int64_t a_stride() const { return aligned(inner) + padding; }
  std::int64_t b_rows() const { return b_transposed ? inner : n; }
  std::int64_t b_cols() const { return b_transposed ? n : inner; }
  std::int64_t b_stride() const { return aligned(b_cols()) + 2 * padding; }
  std::int64_t c_stride() const { return aligned(n) + 8; }
  std::int64_t out_stride() const { return aligned(n) + padding; }
};

// Operands with NaN in their paddings.
struct FullCase {
  FullCase(const FullShape& of, Half half) : shape(of), format(half) {
    std::mt19937 random(11);
    std::normal_distribution<double> normal;
    const auto fill = [&](std::int64_t rows, std::int64_t cols, std::int64_t row_stride) {
      Entries x(static_cast<std::size_t>(of.batch * rows * row_stride), kNan);
      for (std::int64_t row = 0; row < of.batch * rows; ++row)
        for (std::int64_t col = 0; col < cols; ++col)
          x[at(row_stride, rows, 0, row, col)] = narrow(normal(random), half);
      return x;
    };
    a = fill(of.m, of.inner, of.a_stride());
    b = fill(of.b_rows(), of.b_cols(), of.b_stride());
    c = fill(of.m, of.n, of.c_stride());
    for (std::int64_t z = 0; z < of.batch; ++z) scale.push_back(0.25F * static_cast<float>(z + 1));
  }

  double b_at(std::int64_t z, std::int64_t k, std::int64_t col) const {
    const auto [i, j] = shape.b_transposed ? std::pair{k, col} : std::pair{col, k};
    return wide(b[at(shape.b_stride(), shape.b_rows(), z, i, j)], format);
  }

  Product describe() const {
    Product product;
    product.symmetric = false;
    product.batch = shape.batch;
    product.m = shape.m;
    product.n = shape.n;
    product.inner = shape.inner;
    product.format = format;
    product.b_transposed = shape.b_transposed;
    product.alpha = 0.5;
    product.beta = shape.adds ? -0.75 : 0;
    return product;
  }

  FullShape shape;
  Half format;
  Entries a, b, c;
  std::vector<float> scale;
};

// Weights of a product of four matrices or fewer: with `blocks` of them side by side, they are
// blocks of columns. Between rows there are `gap` floats.
struct WeightsCase {
  std::int64_t rows, cols;
  std::int64_t blocks = 1;
  std::int64_t gap = 0;
  std::uint8_t applies = 1;
  bool scaled = true;

  std::int64_t row_stride() const { return blocks * cols + gap; }
  std::int64_t batch_stride() const { return rows * row_stride(); }
};

class FullTest : public GpuTest {
 protected:
  // Adds the product to the stream: of the whole batch or of one matrix.
  void add(const FullCase& one, Product product, const ProductChoice& choice, int only = -1) {
    const FullShape& s = one.shape;
    const std::int64_t first = only < 0 ? 0 : only;
    if (only >= 0) product.batch = 1;
    const OnGpu<std::uint16_t> a(one.a);
    const OnGpu<std::uint16_t> b(one.b);
    const OnGpu<std::uint16_t> c(one.c);
    const OnGpu<float> scale(one.scale);
    const auto words = static_cast<std::size_t>(workspace_bytes(product, choice, 0) / 4);
    const OnGpu<float> workspace(
        std::vector<float>(words, std::numeric_limits<float>::quiet_NaN()));
    const auto tickets = static_cast<std::size_t>(num_tickets(product, choice, 0));
    const OnGpu<std::uint32_t> zeros(std::vector<std::uint32_t>(tickets, 0));
    const std::int64_t a_size = s.m * s.a_stride();
    const std::int64_t b_size = s.b_rows() * s.b_stride();
    const std::int64_t c_size = s.m * s.c_stride();
    product.a = {a.data() + first * a_size, s.a_stride(), a_size};
    product.b = {b.data() + first * b_size, s.b_stride(), b_size};
    if (s.adds) product.c = {c.data() + first * c_size, s.c_stride(), c_size};
    if (s.adds) product.scale = scale.data() + first;
    compute(product, choice, workspace.data(), zeros.data(), 0, stream_);
    EXPECT_EQ(synchronise(), 0) << found();
    EXPECT_EQ(zeros.values(), std::vector<std::uint32_t>(tickets, 0));
  }

  Entries run(const FullCase& one, const ProductChoice& choice, int only = -1) {
    const FullShape& s = one.shape;
    const std::int64_t count = only < 0 ? s.batch : 1;
    const OnGpu<std::uint16_t> out(
        Entries(static_cast<std::size_t>(count * s.m * s.out_stride()), kNan));
    Product product = one.describe();
    product.out = out.data();
    product.out_row_stride = s.out_stride();
    product.out_batch_stride = s.m * s.out_stride();
    add(one, product, choice, only);
    return out.values();
  }

  // Compares with sums in fp64, in units of what rounding may cost; and the padding.
  static void expect_product(const FullCase& one, const Entries& got) {
    const FullShape& s = one.shape;
    const double rounding = one.format == Half::kFp16 ? 0x1p-11 : 0x1p-8;
    double worst = 0;
    std::int64_t touched = 0;
    for (std::int64_t z = 0; z < s.batch; ++z) {
      const double alpha = 0.5 * (s.adds ? one.scale[static_cast<std::size_t>(z)] : 1);
      for (std::int64_t i = 0; i < s.m; ++i) {
        std::vector<double> sums(static_cast<std::size_t>(s.n));
        std::vector<double> sizes(static_cast<std::size_t>(s.n));
        for (std::int64_t k = 0; k < s.inner; ++k) {
          const double factor = alpha * wide(one.a[at(s.a_stride(), s.m, z, i, k)], one.format);
          for (std::int64_t j = 0; j < s.n; ++j) {
            const double term = factor * one.b_at(z, k, j);
            sums[static_cast<std::size_t>(j)] += term;
            sizes[static_cast<std::size_t>(j)] += std::abs(term);
          }
        }
        for (std::int64_t j = 0; j < s.n; ++j) {
          double sum = sums[static_cast<std::size_t>(j)];
          if (s.adds) sum -= 0.75 * wide(one.c[at(s.c_stride(), s.m, z, i, j)], one.format);
          const double is = wide(got[at(s.out_stride(), s.m, z, i, j)], one.format);
          const double allowed =
              rounding * std::abs(sum) + 0x1p-20 * (sizes[static_cast<std::size_t>(j)] + 1);
          if (!(std::abs(is - sum) <= worst * allowed)) worst = std::abs(is - sum) / allowed;
        }
        for (std::int64_t j = s.n; j < s.out_stride(); ++j)
          touched += got[at(s.out_stride(), s.m, z, i, j)] != kNan;
      }
    }
    EXPECT_LE(worst, 1.01);
    EXPECT_EQ(touched, 0);
  }

  void expect_all(FullShape shape, const std::vector<ProductChoice>& choices) {
    for (const bool b_transposed : {true, false}) {
      shape.b_transposed = b_transposed;
      for (const Half format : {Half::kFp16, Half::kBFloat16}) {
        const FullCase one(shape, format);
        for (const ProductChoice& choice : choices) {
          SCOPED_TRACE(testing::Message()
                       << shape.batch << " of " << shape.m << " x " << shape.n << " x "
                       << shape.inner << (b_transposed ? ", transposed, " : ", straight, ")
                       << choice.kernel << " in " << choice.splits << ", format "
                       << static_cast<int>(format));
          seed(++order_);
          expect_product(one, run(one, choice));
        }
      }
    }
  }

  // A batch has the bits of its matrices, in every order of blocks.
  void expect_same_bits(const FullCase& one, const ProductChoice& choice) {
    SCOPED_TRACE(choice.kernel);
    seed(1);
    const Entries together = run(one, choice);
    for (unsigned order = 2; order <= 3; ++order) {
      seed(order);
      EXPECT_TRUE(run(one, choice) == together);
    }
    const Entries alone = run(one, choice, 1);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(),
                           together.begin() + static_cast<std::ptrdiff_t>(alone.size())));
  }

  // The product moves weights as it does where move_weights follows it, bit by bit: the whole batch
  // at once, and its matrices from the second one on.
  void expect_moves(const FullShape& shape, const WeightsCase& weights,
                    const ProductChoice& choice) {
    for (const Half format : {Half::kFp16, Half::kBFloat16}) {
      SCOPED_TRACE(testing::Message()
                   << shape.m << " x " << shape.n << ", " << weights.rows << " x " << weights.cols
                   << ", " << choice.kernel << " in " << choice.splits);
      const FullCase one(shape, format);
      const std::int64_t outer = (shape.batch + weights.blocks - 1) / weights.blocks;
      std::mt19937 random(5);
      std::normal_distribution<float> normal;
      std::vector<float> before(
          static_cast<std::size_t>(outer * weights.batch_stride() + weights.cols));
      for (float& w : before) w = normal(random);
      const OnGpu<float> fused(before);
      const OnGpu<float> apart(before);
      const OnGpu<float> scales({0.5F, 0, -2, 0, 3.1F, 0, 1.7F, 0});  // two words apart
      const OnGpu<std::uint8_t> applies({weights.applies});
      const OnGpu<float> scalars({0.9F, -0.3F});
      Product product = one.describe();
      MovedWeights& w = product.weights;
      w.w = fused.data();
      w.applies = applies.data();
      w.scales = weights.scaled ? scales.data() : nullptr;
      w.scale_stride = 2;
      w.row_stride = weights.row_stride();
      w.inner_stride = weights.cols;
      w.batch_stride = weights.batch_stride();
      w.inner_batch = static_cast<int>(weights.blocks);
      w.rows = static_cast<int>(weights.rows);
      w.cols = static_cast<int>(weights.cols);
      w.decay = scalars.data();
      w.factor = scalars.data() + 1;
      w.scale = 0.7F;
      seed(++order_);
      add(one, product, choice);
      if (weights.applies != 0 && shape.batch > 1) {
        w.first = 1;
        add(one, product, choice, 1);  // the second matrix once more
      }
      move_apart(one, choice, weights, apart, {w.scales, applies.data(), scalars.data()});
      EXPECT_TRUE(fused.values() == apart.values());
      EXPECT_EQ(fused.values() == before, weights.applies == 0);
    }
  }

 private:
  struct Pointers {
    const float* scales;
    const std::uint8_t* applies;
    const float* scalars;  // decay, factor
  };

  void move_apart(const FullCase& one, const ProductChoice& choice, const WeightsCase& weights,
                  const OnGpu<float>& w, const Pointers& pointers) {
    const FullShape& s = one.shape;
    const OnGpu<std::uint16_t> out(run(one, choice));
    // Again for the second matrix, which has inner_batch 1 and a place of its own.
    for (const bool again : {false, true}) {
      if (again && (weights.applies == 0 || s.batch == 1)) return;
      const std::int64_t at_matrix =
          1 / weights.blocks * weights.batch_stride() + 1 % weights.blocks * weights.cols;
      MoveWeights move{.batch = again ? 1 : s.batch,
                       .rows = weights.rows,
                       .cols = weights.cols,
                       .w = w.data() + (again ? at_matrix : 0),
                       .w_row_stride = weights.row_stride(),
                       .inner_batch = again ? 1 : weights.blocks,
                       .w_inner_stride = weights.cols,
                       .w_batch_stride = weights.batch_stride(),
                       .u = out.data() + (again ? s.m * s.out_stride() : 0),
                       .u_format = one.format,
                       .u_row_stride = s.out_stride(),
                       .u_inner_stride = s.m * s.out_stride(),
                       .u_batch_stride = weights.blocks * s.m * s.out_stride(),
                       .decay = pointers.scalars,
                       .factor = pointers.scalars + 1,
                       .scale = 0.7F,
                       .scales = pointers.scales,
                       .scale_stride = 2,
                       .applies = pointers.applies};
      if (again && move.scales != nullptr) move.scales += 2;
      move_weights(move, 0, stream_);
      ASSERT_EQ(synchronise(), 0) << found();
    }
  }

  unsigned order_ = 0;
};

}  // namespace dmuon::kernels::cuda
