#include "dmuon/newton_schulz/backends/cpu.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <cpuinfo.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "dmuon/newton_schulz/backends/cpu_elementwise.h"

namespace dmuon::newton_schulz {

bool multiplies_bf16() {
  static const bool kAnswer =
      cpuinfo_initialize() &&
      (cpuinfo_has_x86_avx512bf16() || cpuinfo_has_x86_amx_bf16() || cpuinfo_has_arm_bf16());
  return kAnswer;
}

namespace {

using at::Tensor;

// Smaller symmetric products are computed in full. In fp32 lower panels are faster below
// kLeastRowsOfHighPanels: 384 x 384 of 1536 columns take 2.9 ms, and 3.3 in panels of 128 rows.
constexpr std::int64_t kMinPanelledRows = 256;
constexpr std::int64_t kLeastRowsOfHighPanels = 768;

// Of the part of a batch that a thread has in fp32: servers' cores have 1 to 2 MB of second-level
// cache. In 16 bits, where a product's own preparations take longer, twice as much is faster.
constexpr std::int64_t kPartBytes = 3 << 19;

// Time of an fp32 FLOP over a bf16 one where the CPU multiplies both: 220 against 102 GFLOP/s a
// core with AVX512-BF16.
constexpr double kFp32CostOfBlas = 2.15;

// Rows and columns are padded to a multiple of so many bytes, a cache line and an AVX-512 register:
// BLAS results depend on the operands' alignment, and this makes it the same for every matrix.
constexpr std::int64_t kAlignment = 64;

std::int64_t padded(std::int64_t size, at::ScalarType dtype) {
  const std::int64_t entries = kAlignment / static_cast<std::int64_t>(c10::elementSize(dtype));
  return (size + entries - 1) / entries * entries;
}

// Products of entries of matrices with smaller norms, or larger than one over it, may leave fp32.
constexpr double kLeastNorm = 1e-15;

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

// The same for what gradients come in; its squares fp64 always holds.
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

constexpr std::int64_t kTile = 16;

// Through a copy whose sizes the compiler knows, so that registers do it: in place a mirrored
// 2048 x 2048 takes as long as a sixteenth of its product.
template <typename T>
void transpose_tile(const T* from, T* to, std::int64_t stride) {
  std::array<std::array<T, kTile>, kTile> tile{};
  for (std::int64_t row = 0; row < kTile; ++row)
    for (std::int64_t col = 0; col < kTile; ++col) tile[row][col] = from[row * stride + col];
  for (std::int64_t col = 0; col < kTile; ++col)
    for (std::int64_t row = 0; row < kTile; ++row) to[col * stride + row] = tile[row][col];
}

template <typename T>
void mirror_matrix(T* data, std::int64_t m) {
  for (std::int64_t top = 0; top < m; top += kTile) {
    const std::int64_t bottom = std::min(top + kTile, m);
    // Whole tiles first; then the one on the diagonal or, of rows that are none, all that is left.
    const std::int64_t whole = bottom - top == kTile ? top : 0;
    for (std::int64_t left = 0; left < whole; left += kTile)
      transpose_tile(data + top * m + left, data + left * m + top, m);
    for (std::int64_t row = top; row < bottom; ++row)
      for (std::int64_t col = whole; col < row; ++col) data[col * m + row] = data[row * m + col];
  }
}

// Copies the strictly lower triangle of each matrix, [(b,) m, m] contiguous, onto its upper one.
void mirror_lower(const Tensor& square) {
  const std::int64_t m = square.size(-1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, square.scalar_type(), "mirror_lower",
                                  [&] {
                                    auto* data = square.data_ptr<scalar_t>();
                                    for (std::int64_t at = 0; at < square.numel(); at += m * m)
                                      mirror_matrix(data + at, m);
                                  });
}

// Products in dtypes that the hardware does not multiply run in fp32 and round once, which is what
// tensor cores do, and is 10 to 20 times faster than torch's own emulation.
bool emulated(at::ScalarType dtype) {
  return dtype == at::kHalf || (dtype == at::kBFloat16 && !multiplies_bf16());
}

void emulated_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                      const Tensor& a, const Tensor& b) {
  const Tensor wide_a = a.to(at::kFloat);
  const Tensor wide_b = b.to(at::kFloat);
  Tensor wide = a.dim() == 2 ? at::mm(wide_a, wide_b) : at::bmm(wide_a, wide_b);
  if (alpha != 1) wide.mul_(alpha);
  if (beta != 0) wide.add_(c.to(at::kFloat), beta);
  out.copy_(wide);
}

}  // namespace

at::ScalarType CpuBackend::default_dtype() const {
  return multiplies_bf16() ? at::kBFloat16 : at::kFloat;
}

// With a 16-bit R the error is up to 3 times the direct form's (square and ill-conditioned
// matrices): R's rounding swamps the small eigenvalues that the iteration then amplifies.
at::ScalarType CpuBackend::gram_dtype(at::ScalarType dtype) const {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

std::vector<std::int64_t> CpuBackend::panel_rows(std::int64_t m, at::ScalarType dtype) const {
  if (m < kMinPanelledRows) return {0};
  if (dtype == at::kFloat && m < kLeastRowsOfHighPanels) return {64, 128, 256};
  return {128, 64, 256};
}

flops::SymmetricCost CpuBackend::symmetric_cost(std::int64_t m, at::ScalarType dtype) const {
  return {.share = panels_share(num_panels(m, panel_rows(m, dtype).front())),
          .gram_dtype = dtype == at::kBFloat16 && multiplies_bf16() ? kFp32CostOfBlas : 1};
}

// For small matrices torch's own overhead outweighs the arithmetic, and a batched product of many
// is up to 40 times faster (32 x 32 bf16); for others one at a time is as fast, and symmetric
// products save their panels. MKL's fp64 batched product differs from batch to batch with more
// than one thread.
bool CpuBackend::batched(std::int64_t short_side, at::ScalarType dtype) const {
  return short_side < kMinPanelledRows && dtype != at::kDouble;
}

// X, its next value, R and Z (WideSquares take more, which costs 128 x 512 and larger ones no
// time), of as many matrices as a core's second-level cache holds for each thread, in parts of
// equal size: 64 of 128 x 128 in fp32 take 0.6 of the time that they take at once.
std::int64_t CpuBackend::at_once(std::int64_t rows, std::int64_t cols, std::int64_t count,
                                 at::ScalarType dtype) const {
  const std::int64_t side = std::min(rows, cols);
  const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
  const std::int64_t elements = 2 * (rows * cols + side * side);
  const std::int64_t held = std::max<std::int64_t>(1, kPartBytes * 4 / size / (elements * size));
  const std::int64_t num_parts = std::max<std::int64_t>(1, count / (at::get_num_threads() * held));
  return (count + num_parts - 1) / num_parts;
}

// The norm is taken in fp64.
Tensor CpuBackend::normalise(const Tensor& x, at::ScalarType dtype, double eps) const {
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

// In batches, which caches hold, another pass costs little, and products have one scale for all.
Start CpuBackend::start(const Update& update, at::ScalarType dtype, double eps) const {
  const Tensor& momentum = update.momentum;
  const Tensor& gradient = update.gradient;
  const bool fuses = momentum.dim() == 2 && (dtype == at::kFloat || dtype == at::kBFloat16) &&
                     momentum.stride(1) == 1 && gradient.stride(1) == 1;
  if (!fuses || !update.applies.item<bool>()) return Backend::start(update, dtype, eps);
  const std::int64_t rows = padded(momentum.size(0), dtype);
  const std::int64_t cols = padded(momentum.size(1), dtype);
  const bool pads = momentum.sizes() != at::IntArrayRef{rows, cols};
  const auto options = momentum.options().dtype(dtype);
  const Tensor x = pads ? at::zeros({rows, cols}, options) : at::empty({rows, cols}, options);
  const double norm =
      std::sqrt(cpu::take_momentum(momentum, gradient, update.mu, update.nesterov, x));
  if (kLeastNorm < norm && norm < 1 / kLeastNorm) return {x, 1 / std::max(norm, eps)};
  const Tensor direction = update.nesterov ? gradient.lerp(momentum, update.mu) : momentum;
  return {normalise(direction.unsqueeze(0), dtype, eps).squeeze(0)};
}

void CpuBackend::product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b) const {
  if (emulated(out.scalar_type())) return emulated_product(out, beta, c, alpha, a, b);
  aten_backend().product(out, beta, c, alpha, a, b);
}

// A CPU knows what applies.
Tensor CpuBackend::take_momentum(const Update& update) const {
  if (!update.applies.item<bool>()) return update.momentum;
  if (!update.nesterov) return update.momentum.lerp_(update.gradient, 1 - update.mu);
  return cpu::take_momentum(update.momentum, update.gradient, update.mu);
}

void CpuBackend::move_weights(const Update& update, const Tensor& direction) const {
  if (update.applies.item<bool>())
    cpu::move_weights(update.master, direction, update.decay, update.lr);
}

void CpuBackend::mirror(const Tensor& out, std::int64_t) const { mirror_lower(out); }

const Backend& cpu_backend() {
  static const CpuBackend kBackend;
  return kBackend;
}

}  // namespace dmuon::newton_schulz
