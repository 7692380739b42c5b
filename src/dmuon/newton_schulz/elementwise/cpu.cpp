#include "dmuon/newton_schulz/products/cpu.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "dmuon/core/error.h"
#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/elementwise/cpu_loops.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

// Rows and columns are padded to a multiple of these bytes, a cache line and an AVX-512 register.
// BLAS results depend on the operands' alignment; padding gives every matrix the same alignment.
constexpr std::int64_t kAlignment = 64;

std::int64_t padded(std::int64_t size, at::ScalarType dtype) {
  const std::int64_t entries = kAlignment / static_cast<std::int64_t>(c10::elementSize(dtype));
  return (size + entries - 1) / entries * entries;
}

// If a norm is smaller, or larger than 1 / kLeastNorm, products of entries may leave fp32's range.
constexpr double kLeastNorm = 1e-15;

// The order of additions does not depend on the batch. The lanes let the compiler vectorise them.
template <typename T, typename Transform>
double sum_of_squares(const T* x, std::int64_t size, Transform transform) {
  constexpr std::int64_t kLanes = 16;
  double sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = transform(x[i + lane]);
      sums[lane] += value * value;
    }
  }
  for (; i < size; ++i) sums[i % kLanes] += transform(x[i]) * transform(x[i]);
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

template <typename In, typename Out, typename Transform>
void write_scaled(const In* x, std::int64_t rows, std::int64_t cols, Out* out, std::int64_t stride,
                  Transform transform, double norm) {
  const double scale = 1 / norm;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t col = 0; col < cols; ++col) {
      out[row * stride + col] = static_cast<Out>(transform(x[row * cols + col]) * scale);
    }
  }
}

// x [rows, cols] contiguous -> out, whose rows lie `stride` apart.
template <typename In, typename Out>
void normalise_matrix(const In* x, std::int64_t rows, std::int64_t cols, Out* out,
                      std::int64_t stride, double eps) {
  const std::int64_t size = rows * cols;
  const auto plain = [](In value) { return static_cast<double>(value); };
  const double squares = sum_of_squares(x, size, plain);
  if (1e-200 < squares && squares < 1e200) {
    return write_scaled(x, rows, cols, out, stride, plain, std::max(std::sqrt(squares), eps));
  }
  // Squares of fp64 entries can leave fp64's range: take the largest entry's exponent out first.
  double largest = 0;
  for (std::int64_t i = 0; i < size; ++i) largest = std::max(largest, std::abs(plain(x[i])));
  if (largest == 0 && squares == 0) return;
  const bool finite = std::isfinite(largest) && !std::isnan(squares);
  const int exponent = finite ? std::ilogb(largest) : 0;
  const auto shifted = [exponent](In value) {
    return std::scalbn(static_cast<double>(value), -exponent);
  };
  const double norm =
      finite ? std::max(std::sqrt(sum_of_squares(x, size, shifted)), std::scalbn(eps, -exponent))
             : std::numeric_limits<double>::quiet_NaN();
  write_scaled(x, rows, cols, out, stride, shifted, norm);
}

// The same for fp32, whose squares fp64 always holds: gradients are fp32.
template <typename Out>
void normalise_fp32(const float* x, std::int64_t rows, std::int64_t cols, Out* out,
                    std::int64_t stride, double eps) {
  const double squares = cpu::sum_of_squares(x, rows * cols);
  if (squares == 0) return;
  const double scale = std::isfinite(squares) ? 1 / std::max(std::sqrt(squares), eps)
                                              : std::numeric_limits<double>::quiet_NaN();
  for (std::int64_t row = 0; row < rows; ++row)
    cpu::write_scaled(x + row * cols, cols, scale, out + row * stride);
}

void normalise_matrix(const float* x, std::int64_t rows, std::int64_t cols, float* out,
                      std::int64_t stride, double eps) {
  normalise_fp32(x, rows, cols, out, stride, eps);
}

void normalise_matrix(const float* x, std::int64_t rows, std::int64_t cols, at::BFloat16* out,
                      std::int64_t stride, double eps) {
  normalise_fp32(x, rows, cols, out, stride, eps);
}

float value_of(const Tensor& factor) { return factor.defined() ? factor.item<float>() : 1; }

Tensor product(const Tensor& gradient, const Tensor& factor) {
  return factor.defined() ? gradient.mul(factor) : gradient;
}

class CpuElementwise final : public Elementwise {
 public:
  std::string_view name() const override { return "cpu"; }

  at::ScalarType default_dtype() const override {
    return prefers_bf16() ? at::kBFloat16 : at::kFloat;
  }

  // The norm is taken in fp64.
  Tensor normalise(const Tensor& x, at::ScalarType dtype, double eps) const override {
    const std::int64_t rows = x.size(1);
    const std::int64_t cols = x.size(2);
    const Tensor source = x.contiguous();
    const Tensor out =
        at::zeros({x.size(0), padded(rows, dtype), padded(cols, dtype)}, x.options().dtype(dtype));
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "normalise", [&] {
      using In = scalar_t;
      const In* in = source.const_data_ptr<In>();
      AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "normalise", [&] {
        auto* result = out.data_ptr<scalar_t>();
        for (std::int64_t i = 0; i < x.size(0); ++i) {
          normalise_matrix(in + i * rows * cols, rows, cols, result + i * out.stride(0),
                           out.stride(1), eps);
        }
      });
    });
    return out;
  }

  // A CPU reads `applies` and the factor without waiting.
  Tensor move_momentum(const MomentumStep& step) const override {
    const auto& [momentum, gradient, scalar, nesterov, applies, memo, factor] = step;
    const double mu = scalar.value;
    if (!applies.item<bool>()) return momentum;
    if (!nesterov) return momentum.lerp_(product(gradient, factor), 1 - mu);
    return cpu::move_momentum(momentum, gradient, value_of(factor), mu);
  }

  // One pass for a matrix by itself. Caches hold a batch, so there a second pass costs little, and
  // products have one scale for all matrices.
  Start start(const MomentumStep& step, at::ScalarType dtype, double eps) const override {
    const auto& [momentum, gradient, scalar, nesterov, applies, memo, factor] = step;
    const double mu = scalar.value;
    const bool fuses = momentum.dim() == 2 && (dtype == at::kFloat || dtype == at::kBFloat16) &&
                       momentum.stride(1) == 1 && gradient.stride(1) == 1;
    if (!fuses || !applies.item<bool>()) {
      return Elementwise::start(step, dtype, eps);
    }
    const std::int64_t rows = padded(momentum.size(0), dtype);
    const std::int64_t cols = padded(momentum.size(1), dtype);
    const bool pads = momentum.sizes() != at::IntArrayRef{rows, cols};
    const auto options = momentum.options().dtype(dtype);
    const Tensor x = pads ? at::zeros({rows, cols}, options) : at::empty({rows, cols}, options);
    const double norm =
        std::sqrt(cpu::move_momentum(momentum, gradient, value_of(factor), mu, nesterov, x));
    if (kLeastNorm < norm && norm < 1 / kLeastNorm) return {x, 1 / std::max(norm, eps)};
    const Tensor direction = nesterov ? product(gradient, factor).lerp(momentum, mu) : momentum;
    return {normalise(direction.unsqueeze(0), dtype, eps).squeeze(0)};
  }

  void move_weights(const WeightStep& step) const override {
    const auto& [weights, decay, update, factor, applies, scales, scale] = step;
    core::invariant(!scales.defined(), "move_weights: a CPU's start has no scales");
    if (applies.item<bool>()) cpu::move_weights(weights, decay.value, update, factor.value * scale);
  }
};

}  // namespace

const Elementwise& cpu_elementwise() {
  static const CpuElementwise kElementwise;
  return kElementwise;
}

}  // namespace dmuon::newton_schulz
