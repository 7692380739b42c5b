#include "dmuon/newton_schulz/normalise.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

constexpr std::int64_t kAlignment = 64;  // bytes: a cache line, and an AVX-512 register

// A fixed order of additions, whatever the batch; the lanes let the compiler vectorise it.
template <typename T, typename Transform>
double sum_of_squares(const T* x, std::int64_t size, Transform transform) {
  constexpr std::int64_t kLanes = 16;
  std::array<double, kLanes> sums{};
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

// 16-bit types convert from float only.
template <typename Out>
Out round_to(double value) {
  if constexpr (sizeof(Out) == 2) {
    return static_cast<Out>(static_cast<float>(value));
  } else {
    return static_cast<Out>(value);
  }
}

template <typename In, typename Out, typename Transform>
void write_scaled(const In* x, std::int64_t rows, std::int64_t cols, Out* out, std::int64_t stride,
                  Transform transform, double norm) {
  const double scale = 1 / norm;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t col = 0; col < cols; ++col) {
      out[row * stride + col] = round_to<Out>(transform(x[row * cols + col]) * scale);
    }
  }
}

// x [rows, cols] contiguous -> out, whose rows lie `stride` apart.
template <typename In, typename Out>
void normalise_matrix(const In* x, std::int64_t rows, std::int64_t cols, Out* out,
                      std::int64_t stride) {
  const std::int64_t size = rows * cols;
  const auto plain = [](In value) { return static_cast<double>(value); };
  const double squares = sum_of_squares(x, size, plain);
  if (1e-200 < squares && squares < 1e200) {
    return write_scaled(x, rows, cols, out, stride, plain, std::sqrt(squares));
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
  const double norm = finite ? std::sqrt(sum_of_squares(x, size, shifted))
                             : std::numeric_limits<double>::quiet_NaN();
  write_scaled(x, rows, cols, out, stride, shifted, norm);
}

Tensor normalise_cpu(const Tensor& x, at::ScalarType dtype) {
  const auto padded = [&](std::int64_t size) {
    const std::int64_t entries = kAlignment / static_cast<std::int64_t>(c10::elementSize(dtype));
    return (size + entries - 1) / entries * entries;
  };
  const std::int64_t rows = x.size(1);
  const std::int64_t cols = x.size(2);
  const Tensor source = x.contiguous();
  const Tensor out = at::zeros({x.size(0), padded(rows), padded(cols)}, x.options().dtype(dtype));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "normalise", [&] {
    using In = scalar_t;
    const In* in = source.const_data_ptr<In>();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "normalise", [&] {
      auto* result = out.data_ptr<scalar_t>();
      for (std::int64_t i = 0; i < x.size(0); ++i) {
        normalise_matrix(in + i * rows * cols, rows, cols, result + i * out.stride(0),
                         out.stride(1));
      }
    });
  });
  return out;
}

}  // namespace

Tensor normalise(const Tensor& x, at::ScalarType dtype) {
  if (x.is_cpu()) return normalise_cpu(x, dtype);
  const std::array<std::int64_t, 2> matrix{-2, -1};
  const bool wide = x.scalar_type() == at::kDouble;
  const Tensor y = x.to(wide ? at::kDouble : at::kFloat);
  const Tensor largest =
      at::linalg_vector_norm(y, std::numeric_limits<double>::infinity(), matrix, /*keepdim=*/true);
  const Tensor scaled = y.div(largest.masked_fill(largest.eq(0), 1));
  const Tensor norm = at::linalg_vector_norm(scaled, 2, matrix, /*keepdim=*/true);
  return scaled.div(norm.masked_fill(norm.eq(0), 1)).to(dtype);
}

}  // namespace dmuon::newton_schulz
