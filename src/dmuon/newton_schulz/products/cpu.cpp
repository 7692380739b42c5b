#include "dmuon/newton_schulz/products/cpu.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <cpuinfo.h>

#include <algorithm>

namespace dmuon::newton_schulz {

bool multiplies_bf16() {
  static const bool kAnswer =
      cpuinfo_initialize() &&
      (cpuinfo_has_x86_avx512bf16() || cpuinfo_has_x86_amx_bf16() || cpuinfo_has_arm_bf16());
  return kAnswer;
}

// Intel's cores that have AVX512-FP16 execute one VDPBF16PS in two cycles and two fp32 FMAs a
// cycle: 90 against 182 GFLOP/s at 2.9 GHz. They have AMX beside, which a virtual machine may hide.
bool prefers_bf16() {
  static const bool kAnswer = [] {
    if (!multiplies_bf16()) return false;
    if (cpuinfo_has_x86_amx_bf16() || !cpuinfo_has_x86_avx512fp16()) return true;
    return cpuinfo_get_core(0)->vendor != cpuinfo_vendor_intel;
  }();
  return kAnswer;
}

namespace {

using at::Tensor;

// Smaller symmetric products are computed in full. In fp32 smaller panels are faster below
// kLeastRowsOfHighPanels: 384 x 384 of 1536 columns take 2.9 ms, and 3.3 in panels of 128 rows.
constexpr std::int64_t kMinPanelledRows = 256;
constexpr std::int64_t kLeastRowsOfHighPanels = 768;

// Bytes of a thread's part of a batch in fp32: servers' cores have 1 to 2 MB of second-level cache.
// In 16 bits products take longer to prepare, and twice as much is faster.
constexpr std::int64_t kPartBytes = 3 << 19;

// Time of an fp32 FLOP over a bf16 one where the CPU multiplies both: 220 against 102 GFLOP/s a
// core with AVX512-BF16.
constexpr double kFp32CostOfBlas = 2.15;
// The same where the CPU prefers fp32: 80 against 146.
constexpr double kPreferredFp32CostOfBlas = 0.55;

constexpr std::int64_t kTile = 16;

// Copies through a tile of constant size, which the compiler keeps in registers. In place,
// mirroring a 2048 x 2048 matrix takes as long as a sixteenth of its product.
template <typename T>
void transpose_tile(const T* from, T* to, std::int64_t stride) {
  T tile[kTile][kTile];
  for (std::int64_t row = 0; row < kTile; ++row)
    for (std::int64_t col = 0; col < kTile; ++col) tile[row][col] = from[row * stride + col];
  for (std::int64_t col = 0; col < kTile; ++col)
    for (std::int64_t row = 0; row < kTile; ++row) to[col * stride + row] = tile[row][col];
}

template <typename T>
void mirror_matrix(T* data, std::int64_t m) {
  for (std::int64_t top = 0; top < m; top += kTile) {
    const std::int64_t bottom = std::min(top + kTile, m);
    // First whole tiles. Then the tile on the diagonal, or all entries of rows that fill no tile.
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

// Products in dtypes that the hardware does not multiply run in fp32 and round once, as on tensor
// cores. This is 10 to 20 times faster than torch's own emulation.
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

// With a 16-bit R the error is up to 3 times the direct form's (square and ill-conditioned
// matrices): R's rounding swamps the small eigenvalues that the iteration then amplifies.
at::ScalarType CpuProducts::gram_dtype(at::ScalarType dtype) const {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

std::vector<std::int64_t> CpuProducts::panel_rows(std::int64_t m, at::ScalarType dtype) const {
  if (m < kMinPanelledRows) return {0};
  if (dtype == at::kFloat && m < kLeastRowsOfHighPanels) return {64, 128, 256};
  return {128, 64, 256};
}

flops::SymmetricCost CpuProducts::symmetric_cost(std::int64_t m, at::ScalarType dtype) const {
  const double fp32_cost = prefers_bf16() ? kFp32CostOfBlas : kPreferredFp32CostOfBlas;
  return {.share = panels_share(num_panels(m, panel_rows(m, dtype).front())),
          .gram_dtype = dtype == at::kBFloat16 && multiplies_bf16() ? fp32_cost : 1};
}

// For small matrices torch's overhead outweighs the arithmetic, and a batched product of many is up
// to 40 times faster (32 x 32 bf16). Larger ones are as fast one by one, and symmetric products
// save FLOPs by panels. With more than one thread MKL's batched product has other bits in other
// batches: in fp64, and on Intel's processors in fp32, by which fp16 is emulated.
bool CpuProducts::batched(std::int64_t short_side, at::ScalarType dtype) const {
  const bool same_bits = dtype != at::kHalf || at::get_num_threads() == 1;
  return short_side < kMinPanelledRows && dtype != at::kDouble && same_bits;
}

// Parts have equal size. A part holds X, its next value, R and Z of as many matrices as each
// thread's second-level cache holds. (WideSquares take more; this costs 128 x 512 and larger ones
// no time.) In parts, 64 of 128 x 128 in fp32 take 0.6 of the time that they take at once.
std::int64_t CpuProducts::at_once(std::int64_t rows, std::int64_t cols, std::int64_t count,
                                  at::ScalarType dtype) const {
  const std::int64_t side = std::min(rows, cols);
  const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
  const std::int64_t elements = 2 * (rows * cols + side * side);
  const std::int64_t held = std::max<std::int64_t>(1, kPartBytes * 4 / size / (elements * size));
  const std::int64_t num_parts = std::max<std::int64_t>(1, count / (at::get_num_threads() * held));
  return (count + num_parts - 1) / num_parts;
}

void CpuProducts::product(const Tensor& out, double beta, const Tensor& c, double alpha,
                          const Tensor& a, const Tensor& b) const {
  if (emulated(out.scalar_type())) return emulated_product(out, beta, c, alpha, a, b);
  aten_products().product(out, beta, c, alpha, a, b);
}

void CpuProducts::mirror(const Tensor& out, std::int64_t) const { mirror_lower(out); }

const Products& cpu_products() {
  static const CpuProducts kProducts;
  return kProducts;
}

}  // namespace dmuon::newton_schulz
