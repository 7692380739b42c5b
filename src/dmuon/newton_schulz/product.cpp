#include "dmuon/newton_schulz/product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "dmuon/newton_schulz/dtype.h"
#include "dmuon/newton_schulz/flops.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

bool emulated(const Tensor& x) {
  return x.is_cpu() && (x.scalar_type() == at::kHalf ||
                        (x.scalar_type() == at::kBFloat16 && !cpu_multiplies_bf16()));
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

// Tiles of 32 x 32 keep both the rows read and the rows written in the first-level cache.
template <typename T>
void mirror_tiles(T* data, std::int64_t m) {
  constexpr std::int64_t kTile = 32;
  for (std::int64_t row_tile = 0; row_tile < m; row_tile += kTile) {
    const std::int64_t row_end = std::min(row_tile + kTile, m);
    for (std::int64_t col_tile = 0; col_tile <= row_tile; col_tile += kTile) {
      for (std::int64_t row = row_tile; row < row_end; ++row) {
        const std::int64_t col_end = std::min(col_tile + kTile, row);
        for (std::int64_t col = col_tile; col < col_end; ++col) {
          data[col * m + row] = data[row * m + col];
        }
      }
    }
  }
}

template <typename T>
void mirror_batch(const Tensor& square) {
  const std::int64_t m = square.size(-1);
  T* data = static_cast<T*>(square.data_ptr());
  for (std::int64_t at = 0; at < square.numel(); at += m * m) mirror_tiles(data + at, m);
}

}  // namespace

void product(const Tensor& out, double beta, const Tensor& c, double alpha, const Tensor& a,
             const Tensor& b) {
  if (emulated(out)) return emulated_product(out, beta, c, alpha, a, b);
  // With out as its own addend ATen accumulates in place, whatever out's strides.
  if (beta != 0 && !out.is_same(c)) out.copy_(c);
  if (a.dim() == 2) {
    out.addmm_(a, b, beta, alpha);
  } else {
    out.baddbmm_(a, b, beta, alpha);
  }
}

void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                       const Tensor& a, const Tensor& b) {
  const std::int64_t m = out.size(-1);
  const std::int64_t panels = num_panels(m);
  for (std::int64_t i = 0; i < panels; ++i) {
    const std::int64_t start = m * i / panels;
    const std::int64_t end = m * (i + 1) / panels;
    const auto panel = [&](const Tensor& x) {
      return x.narrow(-2, start, end - start).narrow(-1, 0, end);
    };
    product(panels == 1 ? out : panel(out), beta, beta == 0 || panels == 1 ? c : panel(c), alpha,
            a.narrow(-2, start, end - start), b.narrow(-1, 0, end));
  }
  mirror_lower(out);
}

void mirror_lower(const Tensor& square) {
  if (!square.is_cpu()) {
    square.copy_(square.tril().add_(square.tril(-1).mT()));
    return;
  }
  switch (square.element_size()) {
    case 2:
      return mirror_batch<std::int16_t>(square);
    case 4:
      return mirror_batch<std::int32_t>(square);
    case 8:
      return mirror_batch<std::int64_t>(square);
  }
  TORCH_INTERNAL_ASSERT(false, "element size ", square.element_size());
}

}  // namespace dmuon::newton_schulz
