#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>

#include "dmuon/kernels/cuda/symmetric.h"
#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/newton_schulz/products.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
namespace gpu = kernels::cuda;

// Rows of the tiles in which results are computed, by the larger of the kernels.
constexpr std::int64_t kRowsOfTiles = gpu::kSymmetric80Large.tile;

// Rows side by side in memory, that start at multiples of 16 bytes.
bool has_rows(const Tensor& x) {
  const bool rows_fit = x.stride(-1) == 1 && x.stride(-2) >= x.size(-1) && x.stride(-2) % 8 == 0;
  const bool batch_fits = x.dim() == 2 || (x.stride(0) % 8 == 0 && x.size(0) <= kMostMatrices);
  return rows_fit && batch_fits && reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

gpu::Matrices matrices(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(-2), x.dim() == 2 ? 0 : x.stride(0)};
}

// Symmetric products in 16 bits by dmuon's kernels, all others by ATen.
class CudaProducts final : public Products {
 public:
  std::string_view name() const override { return "cuda"; }

  at::ScalarType gram_dtype(at::ScalarType dtype) const override {
    return aten().gram_dtype(dtype);
  }

  std::vector<std::int64_t> panel_rows(std::int64_t, at::ScalarType dtype) const override {
    return {half_of(dtype) ? kRowsOfTiles : 0};
  }

  flops::SymmetricCost symmetric_cost(std::int64_t m, at::ScalarType dtype) const override {
    flops::SymmetricCost cost = aten().symmetric_cost(m, dtype);
    if (half_of(dtype)) cost.share = panels_share(num_panels(m, kRowsOfTiles));
    return cost;
  }

  bool batched(std::int64_t short_side, at::ScalarType dtype) const override {
    return aten().batched(short_side, dtype);
  }

  std::int64_t at_once(std::int64_t rows, std::int64_t cols, std::int64_t count,
                       at::ScalarType dtype) const override {
    return std::min(kMostMatrices, aten().at_once(rows, cols, count, dtype));
  }

  void product(const Tensor& out, double beta, const Tensor& c, double alpha, const Tensor& a,
               const Tensor& b) const override {
    aten().product(out, beta, c, alpha, a, b);
  }

  void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b, std::int64_t) const override {
    // The kernel wants rows of b': those of X for X X', and b's own if b is symmetric itself.
    const bool is_square = a.size(-1) == a.size(-2);
    const Tensor transposed = is_square && has_rows(b) ? b : b.mT();
    const bool adds = beta != 0;
    const bool fits = half_of(out.scalar_type()) && has_rows(a) && has_rows(transposed) &&
                      has_rows(out) && (!adds || (has_rows(c) && !c.is_same(out)));
    if (!fits) return aten().symmetric_product(out, beta, c, alpha, a, b, 0);
    multiply(out, beta, adds ? c : Tensor(), alpha, a, transposed);
  }

 protected:
  void mirror(const Tensor&, std::int64_t) const override {}

 private:
  static const Products& aten() { return aten_products(); }

  static void multiply(const Tensor& out, double beta, const Tensor& c, double alpha,
                       const Tensor& a, const Tensor& b) {
    const int device = out.device().index();
    gpu::Symmetric product{.batch = out.dim() == 2 ? 1 : out.size(0),
                           .m = out.size(-1),
                           .inner = a.size(-1),
                           .format = *half_of(out.scalar_type()),
                           .alpha = alpha,
                           .a = matrices(a),
                           .b = matrices(b),
                           .beta = beta,
                           .out = out.mutable_data_ptr(),
                           .out_row_stride = out.stride(-2),
                           .out_batch_stride = out.dim() == 2 ? 0 : out.stride(0)};
    if (c.defined()) product.c = matrices(c);
    // The same for a matrix alone and in a batch, for equal bits.
    gpu::Symmetric alone = product;
    alone.batch = 1;
    const gpu::SymmetricChoice choice = gpu::candidates(alone, device).front();
    const auto words = out.options().dtype(at::kInt);
    const Tensor workspace = at::empty({gpu::workspace_bytes(product, choice, device) / 4}, words);
    const Tensor tickets = at::zeros({gpu::num_tickets(product, choice, device)}, words);
    const bool splits = tickets.numel() > 0;
    gpu::symmetric(product, choice, splits ? workspace.mutable_data_ptr() : nullptr,
                   splits ? static_cast<std::uint32_t*>(tickets.mutable_data_ptr()) : nullptr,
                   device, current_stream(out.device()));
  }
};

}  // namespace

const Products& cuda_products() {
  static const CudaProducts kProducts;
  return kProducts;
}

}  // namespace dmuon::newton_schulz
