#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/kernels/cuda/library.h"
#include "dmuon/kernels/cuda/symmetric.h"
#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/newton_schulz/products.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
namespace gpu = kernels::cuda;

// Rows of the tiles in which results are computed, by the larger of the kernels.
constexpr std::int64_t kRowsOfTiles = gpu::kSymmetric80Large.tile;

// Matrices with fewer rows go through the iteration in batches, of about this many.
constexpr std::int64_t kSmall = 2048;
constexpr std::int64_t kUsualBatch = 16;

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

  bool scales_grams() const override { return true; }

  bool scaled_gram(const Tensor& out, double alpha, const Tensor& factors,
                   const Tensor& a) const override {
    return multiplied(out, 0, {}, alpha, factors, a, a.mT());
  }

  void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b, std::int64_t) const override {
    if (!multiplied(out, beta, c, alpha, {}, a, b))
      aten().symmetric_product(out, beta, c, alpha, a, b, 0);
  }

 protected:
  void mirror(const Tensor&, std::int64_t) const override {}

 private:
  static const Products& aten() { return aten_products(); }

  // False if no kernel can.
  static bool multiplied(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& factors, const Tensor& a, const Tensor& b) {
    const bool adds = beta != 0;
    const auto format = half_of(out.scalar_type());
    std::optional<Operands> operands;
    if (format && has_rows(out) && (!adds || (has_rows(c) && !c.is_same(out))))
      operands = operands_of(a, b);
    if (!operands) return false;
    gpu::Symmetric product{.batch = out.dim() == 2 ? 1 : out.size(0),
                           .m = out.size(-1),
                           .inner = a.size(-1),
                           .format = *format,
                           .alpha = alpha,
                           .a = matrices(operands->a),
                           .b = matrices(operands->b),
                           .transposed = operands->transposed,
                           .beta = beta,
                           .out = out.mutable_data_ptr(),
                           .out_row_stride = out.stride(-2),
                           .out_batch_stride = out.dim() == 2 ? 0 : out.stride(0)};
    if (adds) product.c = matrices(c);
    if (factors.defined()) product.scale = factors.const_data_ptr<float>();
    return multiply(product, out);
  }

  // a and b' with rows side by side; or their transposes.
  struct Operands {
    Tensor a;
    Tensor b;
    bool transposed;
  };

  static std::optional<Operands> operands_of(const Tensor& a, const Tensor& b) {
    // Rows of b' are those of X for X X', and b's own if b is symmetric itself.
    const bool is_symmetric = a.size(-1) == a.size(-2) && has_rows(a) && has_rows(b);
    const Tensor other = is_symmetric ? b : b.mT();
    if (has_rows(a) && has_rows(other)) return Operands{a, other, false};
    if (has_rows(a.mT()) && has_rows(other.mT())) return Operands{a.mT(), other.mT(), true};
    return std::nullopt;
  }

  // False if no kernel of this device can.
  static bool multiply(const gpu::Symmetric& product, const Tensor& out) {
    const int device = out.device().index();
    const std::optional<gpu::SymmetricChoice>& choice = choice_for(product, device);
    if (!choice) return false;
    void* const stream = current_stream(out.device());
    Tensor workspace;
    Tensor tickets;
    if (choice->splits > 1) {
      const auto words = out.options().dtype(at::kInt);
      workspace = at::empty({gpu::workspace_bytes(product, *choice, device) / 4}, words);
      const std::int64_t count = gpu::num_tickets(product, *choice, device);
      // A captured product has zeros of its own, which its graph clears.
      tickets =
          gpu::is_captured(stream) ? at::zeros({count}, words) : kept_zeros(count, words, stream);
    }
    gpu::symmetric(
        product, *choice, workspace.defined() ? workspace.mutable_data_ptr() : nullptr,
        tickets.defined() ? static_cast<std::uint32_t*>(tickets.mutable_data_ptr()) : nullptr,
        device, stream);
    return true;
  }

  // The same for a matrix alone and in a batch, for equal bits. Small ones come in batches.
  static const std::optional<gpu::SymmetricChoice>& choice_for(const gpu::Symmetric& product,
                                                               int device) {
    using Key = std::tuple<int, std::int64_t, std::int64_t, bool>;
    thread_local std::map<Key, std::optional<gpu::SymmetricChoice>> known;
    const Key key{device, product.m, product.inner, product.transposed};
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
    gpu::Symmetric usual = product;
    const bool is_small = product.m < kSmall;
    usual.batch = is_small ? kUsualBatch : 1;
    std::vector<gpu::SymmetricChoice> choices = gpu::candidates(usual, device);
    // A batch fills the device without splits, which cost memory's time.
    if (is_small) std::erase_if(choices, [](const auto& one) { return one.splits > 1; });
    std::optional<gpu::SymmetricChoice> choice;
    if (!choices.empty()) choice = std::move(choices.front());
    return known.emplace(key, std::move(choice)).first->second;
  }
};

}  // namespace

const Products& cuda_products() {
  static const CudaProducts kProducts;
  return kProducts;
}

}  // namespace dmuon::newton_schulz
