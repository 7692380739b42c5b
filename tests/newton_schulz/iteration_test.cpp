#include "dmuon/newton_schulz/iteration.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "dmuon/newton_schulz/orthogonalize.h"
#include "tests/newton_schulz/every_backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

class IterationTest : public EveryProducts {
 protected:
  Tensor iterated(const Tensor& x, double scale, int num_steps, const flops::Segments& segments) {
    const Steps steps{resolve("quintic", num_steps), segments, at::kFloat, 0};
    return computed(products_, iterate(products_, {x.clone(), scale}, steps));
  }
};

INSTANTIATE_TEST_SUITE_P(All, IterationTest, EveryProducts::all(), EveryProducts::name_of);

// By the definition, in fp64: X <- a X + (b R + c R^2) X.
Tensor plain(const Tensor& start, const Coefficients& rows) {
  Tensor x = start.to(at::kDouble);
  for (const auto& [a, b, c] : rows) {
    const Tensor r = x.matmul(x.mT());
    x = x.mul(a).add(r.mul(b).add(r.matmul(r), c).matmul(x));
  }
  return x;
}

Tensor plain(const Tensor& start, int num_steps) {
  return plain(start, resolve("quintic", num_steps));
}

TEST_P(IterationTest, FollowsTheDefinitionInSegmentsOfAnyLength) {
  for (const auto& [rows, cols] : {std::pair{16, 48}, {48, 16}, {32, 32}}) {
    const Tensor given = random({rows, cols}, at::kFloat);
    const Tensor x = given.div(given.norm());
    for (const flops::Segments& segments :
         {flops::Segments{1}, {1, 1, 1}, {2}, {3}, {3, 2}, {2, 1, 2}, {5}}) {
      int num_steps = 0;
      for (const int length : segments) num_steps += length;
      const Tensor exact = plain(x, num_steps);
      const Tensor got = iterated(x, 1, num_steps, segments);
      EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item().toDouble(),
                2e-4 * exact.norm().item().toDouble())
          << rows << " " << cols << " " << num_steps;
    }
  }
}

// A power of two, which no rounding sees.
TEST_P(IterationTest, TakesAScaleForADividedMatrix) {
  const Tensor x = random({2, 16, 48}, at::kFloat).mul(0.03125);
  for (const flops::Segments& segments : {flops::Segments{1}, {1, 1}, {2}, {3, 2}}) {
    int num_steps = 0;
    for (const int length : segments) num_steps += length;
    EXPECT_TRUE(iterated(x.mul(64), 1.0 / 64, num_steps, segments)
                    .equal(iterated(x, 1, num_steps, segments)))
        << num_steps;
  }
}

// Two matrices of quite other norms, whose entries are below 2^15, and what makes their norms 1.
Start scaled_start(std::int64_t rows, std::int64_t cols, at::ScalarType dtype) {
  const Tensor sizes = at::tensor({0x1p13F, 0x1p5F}).view({2, 1, 1});
  const Tensor x = random({2, rows, cols}, at::kFloat).clamp(-3, 3).mul(sizes).to(dtype);
  const Tensor norms = x.to(at::kFloat).norm(2, at::IntArrayRef{-2, -1}, /*keepdim=*/true);
  return {x, 1, norms.reciprocal()};
}

void expect_scaled(const Products& products, const Start& start, const flops::Segments& segments,
                   const Elementwise* elementwise) {
  int num_steps = 0;
  for (const int length : segments) num_steps += length;
  const at::ScalarType dtype = start.x.scalar_type();
  const Steps steps{resolve("quintic", num_steps), segments, dtype, 0, true};
  const PendingProduct last =
      iterate(products, {start.x.clone(), 1, start.scales, elementwise}, steps);
  const Tensor exact = plain(start.x.to(at::kDouble).mul(start.scales), num_steps);
  const Tensor got = computed(products, last);
  EXPECT_EQ(got.scalar_type(), dtype);
  EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item().toDouble(),
            4 * tolerance(dtype) * exact.norm().item().toDouble())
      << start.x.sizes() << " " << num_steps;
}

TEST_P(IterationTest, TakesScalesThatTheDeviceKnows) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16})
    for (const auto& [rows, cols] : {std::pair{16, 64}, {64, 16}})
      for (const flops::Segments& segments : {flops::Segments{}, {1}, {1, 1}, {2}, {2, 1}})
        expect_scaled(products_, scaled_start(rows, cols, dtype), segments, &cpu_elementwise());
}

TEST(Iteration, TakesScalesThatTheDeviceKnowsInItsProducts) {
  // Without something that multiplies X itself.
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16})
    for (const auto& [rows, cols] : {std::pair{16, 64}, {64, 16}})
      for (const flops::Segments& segments : {flops::Segments{}, {1}, {1, 1}, {2}, {2, 1}})
        expect_scaled(plain_products(), scaled_start(rows, cols, dtype), segments, nullptr);
}

TEST_P(IterationTest, WithoutStepsIsTheScaledStart) {
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{3, 8}, {2, 5, 3}}) {
    const Tensor x = random(sizes, at::kFloat);
    EXPECT_TRUE(iterated(x, 0.25, 0, {}).equal(x.mul(0.25)));
  }
}

// In 16 bits, whose direct form is off by 1e-2 in bf16. In a batch, and either side the shorter.
TEST_P(IterationTest, WithWideSquaresFollowsTheDefinition) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    if (!products_.has_wide_squares(dtype)) continue;
    for (const auto& [rows, cols] : {std::pair{48, 96}, {96, 48}, {33, 99}}) {
      const Tensor given = random({2, rows, cols}, at::kFloat);
      const Tensor x = given.div(given.norm(2, at::IntArrayRef{-2, -1}, /*keepdim=*/true));
      for (const flops::Segments& segments :
           {flops::Segments{1}, {1, 1}, {2}, {2, 1}, {3, 2}, {4}}) {
        int num_steps = 0;
        for (const int length : segments) num_steps += length;
        const Steps steps{resolve("quintic", num_steps), segments, std::nullopt, 0};
        const auto result = [&](const Tensor& some, double scale) {
          return computed(products_, iterate(products_, {some.clone(), scale}, steps));
        };
        const Tensor narrow = x.to(dtype);
        const Tensor got = result(narrow, 1);
        const Tensor exact = plain(narrow, num_steps);
        EXPECT_EQ(got.scalar_type(), dtype);
        EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item().toDouble(),
                  2 * tolerance(dtype) * exact.norm().item().toDouble())
            << rows << " " << cols << " " << num_steps;
        EXPECT_TRUE(result(narrow[1], 1).equal(got[1])) << num_steps;
        EXPECT_TRUE(result(narrow.mul(64), 1.0 / 64).equal(got)) << num_steps;
      }
    }
  }
}

// Remembers the memory of every square that a product writes.
class Recording final : public PlainProducts {
 public:
  void product(const Tensor& out, double beta, const Tensor& c, double alpha, const Tensor& a,
               const Tensor& b) const override {
    if (out.size(-1) == out.size(-2)) squares[out.const_data_ptr()] = out.nbytes();
    PlainProducts::product(out, beta, c, alpha, a, b);
  }
  void wide_gram(const WideSquare& out, double alpha, const Tensor& a) const override {
    record(out);
    PlainProducts::wide_gram(out, alpha, a);
  }
  void wide_product(const WideSquare& out, double beta, const WideSquare& c, double alpha,
                    const WideSquare& a, const WideSquare& b) const override {
    record(out);
    PlainProducts::wide_product(out, beta, c, alpha, a, b);
  }

  void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b, std::int64_t rows) const override {
    ++num_symmetric;
    Products::symmetric_product(out, beta, c, alpha, a, b, rows);
  }

  mutable std::map<const void*, std::size_t> squares;
  mutable int num_symmetric = 0;

 private:
  void record(const WideSquare& out) const {
    squares[out.wide.const_data_ptr()] = out.wide.nbytes() + out.narrow.nbytes();
  }
};

// In any form, but only steps by themselves spare the product of Z.
TEST_P(IterationTest, CubicRowsFollowTheDefinition) {
  const Coefficients rows = resolve("cubic5", 5);
  for (const auto& [height, width] : {std::pair{16, 48}, {48, 16}}) {
    const Tensor given = random({height, width}, at::kFloat);
    const Tensor x = given.div(given.norm());
    const auto expect = [&](const Tensor& start, const Steps& steps, double error) {
      const Tensor exact = plain(start, rows);
      const Tensor got = computed(products_, iterate(products_, {start.mul(64), 1.0 / 64}, steps));
      EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item().toDouble(),
                error * exact.norm().item().toDouble())
          << start.toString() << " " << height << " " << steps.segments.size();
    };
    for (const flops::Segments& segments : {flops::Segments{1, 1, 1, 1, 1}, {2, 1, 2}}) {
      expect(x, {rows, segments, at::kFloat, 0}, 2e-4);
      for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
        if (products_.has_wide_squares(dtype))
          expect(x.to(dtype), {rows, segments, std::nullopt, 0},
                 3 * tolerance(dtype));  // X five times
      }
    }
  }
}

TEST(Iteration, CubicRowsTakeNoSquareOfR) {
  const Recording products;
  const Tensor x = filled({16, 48}, 0.01, at::kFloat);
  iterate(products, {x}, {resolve("cubic5", 5), {1, 1, 1, 1, 1}, at::kFloat, 0});
  EXPECT_EQ(products.num_symmetric, 5);  // each step's R
}

// Plans count workspace by these.
TEST(Iteration, HoldsAsManySquaresAsFlopsSays) {
  for (const bool wide : {false, true}) {
    for (const flops::Segments& segments :
         {flops::Segments{1}, {1, 1, 1}, {2}, {2, 3}, {2, 1, 2}, {5}}) {
      int num_steps = 0;
      for (const int length : segments) num_steps += length;
      const Recording products;
      const std::optional<at::ScalarType> dtype = wide ? std::nullopt : std::optional(at::kHalf);
      const Tensor x = random({16, 48}, at::kDouble).mul(0.01).to(at::kHalf);
      iterate(products, {x}, {resolve("quintic", num_steps), segments, dtype, 0});
      const int bytes = wide ? flops::kWideSquareBytes : 2;
      EXPECT_EQ(std::ssize(products.squares), flops::squares(segments)) << num_steps;
      for (const auto& [_, size] : products.squares)
        EXPECT_EQ(size, static_cast<std::size_t>(16 * 16 * bytes));
    }
  }
}

// Of a pair of steps two products are mixed, R Z and Z Q; of three steps four.
TEST(Iteration, MultipliesMixedSquaresIn16BitsSymmetricallyOnlyIfTheStepsSaySo) {
  for (const auto& [segments, num_mixed] :
       {std::pair{flops::Segments{2, 1, 2}, 4}, {flops::Segments{2, 3}, 6}}) {
    const flops::Products count = flops::products(segments);
    for (const at::ScalarType dtype : {at::kHalf, at::kFloat}) {
      for (const bool symmetric : {false, true}) {
        const Recording products;
        const Tensor x = filled({16, 48}, 0.01, dtype);
        iterate(products, {x}, {resolve("quintic", 5), segments, dtype, 0, symmetric});
        const int full = symmetric || dtype == at::kFloat ? 0 : num_mixed;
        EXPECT_EQ(products.num_symmetric, count.to_square + count.square - full);
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::newton_schulz
