#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "dmuon/kernels/cuda/library.h"
#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/newton_schulz/products.h"
#include "dmuon/newton_schulz/products/cuda_product.h"
#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
using cuda::Kind;
namespace gpu = kernels::cuda;

// Rows of the tiles in which results are computed, by the larger of the kernels.
constexpr std::int64_t kRowsOfTiles = gpu::kProduct80Large.tile;

// False if no kernel can.
bool multiplied(Kind kind, const Tensor& out, const cuda::Operands& operands,
                const Tensor& factors = {}) {
  std::optional<gpu::Product> product = cuda::described(kind, operands);
  if (!product || !cuda::write_to(*product, out, operands)) return false;
  if (factors.defined()) product->scale = factors.const_data_ptr<float>();
  return cuda::compute(*product, out);
}

// Weights [..., rows, cols] of up to four dimensions, whose rows have their entries side by side.
// Returns nothing for others, and if there are not as many matrices as products.
std::optional<gpu::MovedWeights> moved(const Tensor& weights, std::int64_t batch) {
  if (weights.dim() > 4 || weights.scalar_type() != at::kFloat || weights.stride(-1) != 1 ||
      weights.numel() == 0) {
    return std::nullopt;
  }
  const MatricesOf matrices(weights);
  if (matrices.size() != batch) return std::nullopt;
  gpu::MovedWeights found{};
  found.w = weights.data_ptr<float>();
  found.row_stride = weights.stride(-2);
  found.inner_stride = matrices.inner_stride;
  found.batch_stride = matrices.outer_stride;
  found.inner_batch = static_cast<int>(matrices.inner);
  found.rows = static_cast<int>(weights.size(-2));
  found.cols = static_cast<int>(weights.size(-1));
  return found;
}

// Products in 16 bits by dmuon's kernels, all others by ATen.
class CudaProducts final : public Products {
 public:
  enum Takes { kSymmetric, kAll, kAllAndWeights };

  CudaProducts(std::string_view name, Takes takes) : name_(name), takes_(takes) {}

  std::string_view name() const override { return name_; }

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
    return std::min(gpu::kMaxBatch, aten().at_once(rows, cols, count, dtype));
  }

  void product(const Tensor& out, double beta, const Tensor& c, double alpha, const Tensor& a,
               const Tensor& b) const override {
    if (takes_ == kSymmetric || !multiplied(Kind::kFull, out, {beta, c, alpha, a, b}))
      aten().product(out, beta, c, alpha, a, b);
  }

  bool scales_grams() const override { return true; }

  bool scaled_gram(const Tensor& out, double alpha, const Tensor& factors,
                   const Tensor& a) const override {
    return multiplied(Kind::kSymmetric, out, {0, {}, alpha, a, a.mT()}, factors);
  }

  void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b, std::int64_t) const override {
    if (!multiplied(Kind::kSymmetric, out, {beta, c, alpha, a, b}))
      aten().symmetric_product(out, beta, c, alpha, a, b, 0);
  }

  bool add_to_weights(const Tensor& weights, const Scalar& decay, const Scalar& factor,
                      const PendingProduct& pending, const Tensor& applies) const override {
    if (takes_ != kAllAndWeights || pending.factors.defined()) return false;
    std::optional<gpu::Product> product = cuda::described(
        Kind::kFull, {pending.beta, pending.c, pending.alpha, pending.a, pending.b});
    if (!product) return false;
    const std::optional<gpu::MovedWeights> found = moved(weights, product->batch);
    if (!found) return false;
    product->weights = *found;
    product->weights.applies = static_cast<const std::uint8_t*>(applies.const_data_ptr());
    const ScalarsOnDevice scalars({decay, factor}, weights);
    product->weights.decay = scalars[0];
    product->weights.factor = scalars[1];
    product->weights.scale = static_cast<float>(pending.scale);
    if (pending.scales.defined()) {
      product->weights.scales = pending.scales.const_data_ptr<float>();
      product->weights.scale_stride = pending.scales.stride(0);
    }
    return cuda::compute(*product, weights);
  }

 protected:
  void mirror(const Tensor&, std::int64_t) const override {}

 private:
  static const Products& aten() { return aten_products(); }

  std::string_view name_;
  Takes takes_;
};

}  // namespace

bool product_by(const gpu::ProductChoice& choice, bool symmetric, const Tensor& out, double beta,
                const Tensor& c, double alpha, const Tensor& a, const Tensor& b) {
  const cuda::Operands operands{beta, c, alpha, a, b};
  std::optional<gpu::Product> product =
      cuda::described(symmetric ? Kind::kSymmetric : Kind::kFull, operands);
  if (!product || !cuda::write_to(*product, out, operands)) return false;
  if (!gpu::computes(choice, *product)) return false;
  cuda::compute_by(choice, *product, out);
  return true;
}

const Products& cuda_products() {
  static const CudaProducts kProducts("cuda", CudaProducts::kSymmetric);
  return kProducts;
}

const Products& cuda_full_products() {
  static const CudaProducts kProducts("cuda_full", CudaProducts::kAll);
  return kProducts;
}

const Products& cuda_fused_products() {
  static const CudaProducts kProducts("cuda_fused", CudaProducts::kAllAndWeights);
  return kProducts;
}

}  // namespace dmuon::newton_schulz
