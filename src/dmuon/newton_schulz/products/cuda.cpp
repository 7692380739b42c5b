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
#include "dmuon/kernels/cuda/product.h"
#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/newton_schulz/products.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
namespace gpu = kernels::cuda;

// Rows of the tiles in which results are computed, by the larger of the kernels.
constexpr std::int64_t kRowsOfTiles = gpu::kProduct80Large.tile;

// Matrices with fewer rows go through the iteration in batches, of about this many.
constexpr std::int64_t kSmall = 2048;
constexpr std::int64_t kUsualBatch = 16;

// Bytes of scratch memory of a launch, unless one matrix needs more. Plans do not count it.
constexpr std::int64_t kMostScratch = std::int64_t{32} << 20;

// Rows side by side in memory, that start at multiples of 16 bytes.
bool has_rows(const Tensor& x) {
  const bool rows_fit = x.stride(-1) == 1 && x.stride(-2) >= x.size(-1) && x.stride(-2) % 8 == 0;
  const bool batch_fits = x.dim() == 2 || (x.stride(0) % 8 == 0 && x.size(0) <= gpu::kMaxBatch);
  return rows_fit && batch_fits && reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

gpu::Matrices matrices(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(-2), x.dim() == 2 ? 0 : x.stride(0)};
}

// a and b' with rows side by side; or their transposes.
struct Operands {
  Tensor a;
  Tensor b;
  bool transposed;
};

std::optional<Operands> operands_of(const Tensor& a, const Tensor& b) {
  // Rows of b' are those of X for X X', and b's own if b is symmetric itself.
  const bool is_symmetric = a.size(-1) == a.size(-2) && has_rows(a) && has_rows(b);
  const Tensor other = is_symmetric ? b : b.mT();
  if (has_rows(a) && has_rows(other)) return Operands{a, other, false};
  if (has_rows(a.mT()) && has_rows(other.mT())) return Operands{a.mT(), other.mT(), true};
  return std::nullopt;
}

// Returns nothing for dtypes and strides that the kernels lack.
std::optional<gpu::Product> described(const Tensor& out, double beta, const Tensor& c,
                                        double alpha, const Tensor& a, const Tensor& b) {
  const bool adds = beta != 0;
  const auto format = half_of(out.scalar_type());
  std::optional<Operands> operands;
  if (format && has_rows(out) && (!adds || (has_rows(c) && !c.is_same(out))))
    operands = operands_of(a, b);
  if (!operands) return std::nullopt;
  gpu::Product product{.batch = out.dim() == 2 ? 1 : out.size(0),
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
  return product;
}

// The matrices [first, first + count) of the batch.
gpu::Product part_of(gpu::Product product, std::int64_t first, std::int64_t count) {
  const auto moved = [&](const void* data, std::int64_t batch_stride) {
    return static_cast<const std::uint16_t*>(data) + first * batch_stride;
  };
  for (gpu::Matrices* x : {&product.a, &product.b, &product.c})
    if (x->data != nullptr) x->data = moved(x->data, x->batch_stride);
  product.out = static_cast<std::uint16_t*>(product.out) + first * product.out_batch_stride;
  if (product.scale != nullptr) product.scale += first;
  product.batch = count;
  return product;
}

// A batch that is cut goes in parts that share scratch memory.
void launch(const gpu::Product& product, const gpu::ProductChoice& choice, const Tensor& out) {
  const int device = out.device().index();
  void* const stream = current_stream(out.device());
  if (choice.splits == 1) return gpu::compute(product, choice, nullptr, nullptr, device, stream);
  gpu::Product one = product;
  one.batch = 1;
  const std::int64_t bytes = gpu::workspace_bytes(one, choice, device);
  const std::int64_t tickets = gpu::num_tickets(one, choice, device);
  const std::int64_t at_once = std::clamp(kMostScratch / bytes, std::int64_t{1}, product.batch);
  const auto words = out.options().dtype(at::kInt);
  const Tensor workspace = at::empty({at_once * bytes / 4}, words);
  // A captured product has zeros of its own, which its graph clears.
  const Tensor zeros = gpu::is_captured(stream) ? at::zeros({at_once * tickets}, words)
                                                : kept_zeros(at_once * tickets, words, stream);
  for (std::int64_t first = 0; first < product.batch; first += at_once) {
    gpu::compute(part_of(product, first, std::min(at_once, product.batch - first)), choice,
                   workspace.mutable_data_ptr(),
                   static_cast<std::uint32_t*>(zeros.mutable_data_ptr()), device, stream);
  }
}

// The same for a matrix alone and in a batch, for equal bits. Small ones come in batches.
const std::optional<gpu::ProductChoice>& choice_for(const gpu::Product& product, int device) {
  using Key = std::tuple<int, std::int64_t, std::int64_t, bool>;
  thread_local std::map<Key, std::optional<gpu::ProductChoice>> known;
  const Key key{device, product.m, product.inner, product.transposed};
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  gpu::Product usual = product;
  const bool is_small = product.m < kSmall;
  usual.batch = is_small ? kUsualBatch : 1;
  std::vector<gpu::ProductChoice> choices = gpu::candidates(usual, device);
  // A batch fills the device without splits, which cost memory's time.
  if (is_small) std::erase_if(choices, [](const auto& one) { return one.splits > 1; });
  std::optional<gpu::ProductChoice> choice;
  if (!choices.empty()) choice = std::move(choices.front());
  return known.emplace(key, std::move(choice)).first->second;
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
    return std::min(gpu::kMaxBatch, aten().at_once(rows, cols, count, dtype));
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
    std::optional<gpu::Product> product = described(out, beta, c, alpha, a, b);
    if (!product) return false;
    if (factors.defined()) product->scale = factors.const_data_ptr<float>();
    const std::optional<gpu::ProductChoice>& choice = choice_for(*product, out.device().index());
    if (choice) launch(*product, *choice, out);
    return choice.has_value();
  }
};

}  // namespace

bool product_by(const gpu::ProductChoice& choice, const Tensor& out, double beta,
                          const Tensor& c, double alpha, const Tensor& a, const Tensor& b) {
  const std::optional<gpu::Product> product = described(out, beta, c, alpha, a, b);
  if (!product || (product->transposed && !choice.kernel.starts_with("product90"))) return false;
  launch(*product, choice, out);
  return true;
}

const Products& cuda_products() {
  static const CudaProducts kProducts;
  return kProducts;
}

}  // namespace dmuon::newton_schulz
