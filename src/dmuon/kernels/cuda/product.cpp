#include "dmuon/kernels/cuda/product.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/families.h"
#include "dmuon/kernels/cuda/library.h"

namespace dmuon::kernels::cuda {
namespace {

constexpr std::int64_t kMaxRows = std::int64_t{1} << 20;
constexpr std::int64_t kMaxInner = std::int64_t{1} << 30;

std::array<const ProductFamily*, 2> families() { return {&product90(), &product80()}; }

const ProductFamily& family_of(const ProductChoice& choice) {
  const auto all = families();
  const auto* const found = std::ranges::find_if(
      all, [&](const ProductFamily* family) { return family->has(choice.kernel); });
  core::require(found != all.end(),
                "product: choice.kernel must be product80_64, product80_128 or product90; "
                "got ",
                choice.kernel);
  const int most = (*found)->max_splits;
  core::require(choice.splits >= 1 && choice.splits <= most,
                "product: choice.splits must be in [1, ", most, "]; got ", choice.splits);
  return **found;
}

void check_matrices(const char* name, const Matrices& x, std::int64_t cols) {
  core::require(x.data != nullptr && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0,
                "product: ", name, " must be an address that is a multiple of 16; got ", x.data);
  core::require(x.row_stride >= cols && x.row_stride % 8 == 0, "product: the row stride of ", name,
                " must be a multiple of 8, at least ", cols, "; got ", x.row_stride);
  core::require(x.batch_stride >= 0 && x.batch_stride % 8 == 0, "product: the batch stride of ",
                name, " must be a multiple of 8, at least 0; got ", x.batch_stride);
}

void check_sizes(const Product& product) {
  for (const auto& [name, size, most] :
       {std::tuple<const char*, std::int64_t, std::int64_t>{"batch", product.batch, kMaxBatch},
        {"m", product.m, kMaxRows},
        {"n", product.cols(), kMaxRows},
        {"inner", product.inner, kMaxInner}}) {
    core::require(size >= 0 && size <= most, "product: ", name, " must be in [0, ", most, "]; got ",
                  size);
  }
}

bool aligned(const void* data, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}

void check_weights(const Product& product) {
  const MovedWeights& weights = product.weights;
  core::require(!product.symmetric, "product: weights move by full products alone");
  core::require(aligned(weights.w, 4) && aligned(weights.scales, 4),
                "product: weights.w and weights.scales must be multiples of 4; got ", weights.w,
                " and ", weights.scales);
  for (const auto& [name, address] :
       {std::pair<const char*, const void*>{"applies", weights.applies},
        {"decay", weights.decay},
        {"factor", weights.factor}}) {
    core::require(address != nullptr, "product: weights.", name, " must be an address; got null");
  }
  core::require(std::min({weights.scale_stride, weights.row_stride, weights.inner_stride,
                          weights.batch_stride}) >= 0,
                "product: strides of weights must be at least 0");
  core::require(
      weights.inner_batch >= 1 && weights.first >= 0,
      "product: weights.inner_batch must be at least 1 and weights.first at least 0; got ",
      weights.inner_batch, " and ", weights.first);
  core::require(0 <= weights.rows && weights.rows <= product.m && 0 <= weights.cols &&
                    weights.cols <= product.n,
                "product: weights must have at most ", product.m, " rows and ", product.n,
                " columns; got ", weights.rows, " and ", weights.cols);
}

void check_scratch(const ProductChoice& choice, const void* workspace,
                   const std::uint32_t* tickets) {
  core::require(workspace != nullptr && aligned(workspace, 16),
                "product: workspace must be an address that is a multiple of 16, because of ",
                choice.splits, " splits; got ", workspace);
  core::require(tickets != nullptr && aligned(tickets, 4),
                "product: tickets must be an address that is a multiple of 4, because of ",
                choice.splits, " splits; got ", tickets);
}

void check(const Product& product) {
  if (product.inner > 0) {
    check_matrices("a", product.a, product.a_transposed ? product.m : product.inner);
    check_matrices("b", product.b, product.b_transposed ? product.cols() : product.inner);
  }
  if (product.beta != 0) check_matrices("c", product.c, product.cols());
  if (product.weights.w != nullptr) {
    check_weights(product);
  } else {
    check_matrices("out", {product.out, product.out_row_stride, product.out_batch_stride},
                   product.cols());
  }
  core::require(aligned(product.scale, 4),
                "product: scale must be an address that is a multiple of 4; got ", product.scale);
  core::require(product.symmetric || product.diagonal == 0,
                "product: diagonal must be 0 in a full product; got ", product.diagonal);
}

}  // namespace

ProductParameters parameters_of(const Product& product) {
  ProductParameters p{};
  p.a = static_cast<const std::uint16_t*>(product.a.data);
  p.b = static_cast<const std::uint16_t*>(product.b.data);
  p.c = product.beta == 0 ? nullptr : static_cast<const std::uint16_t*>(product.c.data);
  p.out = static_cast<std::uint16_t*>(product.out);
  p.scale = product.scale;
  p.a_row_stride = product.a.row_stride;
  p.a_batch_stride = product.a.batch_stride;
  p.b_row_stride = product.b.row_stride;
  p.b_batch_stride = product.b.batch_stride;
  p.c_row_stride = product.c.row_stride;
  p.c_batch_stride = product.c.batch_stride;
  p.out_row_stride = product.out_row_stride;
  p.out_batch_stride = product.out_batch_stride;
  p.one_operand = product.symmetric && product.a == product.b;
  p.b_transposed = product.b_transposed;
  p.m = static_cast<int>(product.m);
  p.n = static_cast<int>(product.cols());
  p.inner = static_cast<int>(product.inner);
  p.alpha = static_cast<float>(product.alpha);
  p.beta = static_cast<float>(product.beta);
  p.diagonal = static_cast<float>(product.diagonal);
  p.weights = product.weights;
  const MovedWeights& weights = product.weights;
  const auto in_fours = [](std::int64_t stride) { return stride % 4 == 0; };
  p.weights.in_fours = aligned(weights.w, 16) && in_fours(weights.row_stride) &&
                       in_fours(weights.inner_stride) && in_fours(weights.batch_stride);
  return p;
}

std::vector<ProductChoice> candidates(const Product& product, int device) {
  check_sizes(product);
  std::vector<Estimate> found;
  for (const ProductFamily* family : families()) family->add_candidates(found, product, device);
  std::ranges::stable_sort(found, {}, &Estimate::us);
  std::vector<ProductChoice> choices;
  for (Estimate& one : found) choices.push_back(std::move(one.choice));
  return choices;
}

bool computes(const ProductChoice& choice, const Product& product) {
  return family_of(choice).takes(product, choice.kernel);
}

std::int64_t workspace_bytes(const Product& product, const ProductChoice& choice, int device) {
  const ProductFamily& family = family_of(choice);
  return choice.splits == 1 ? 0 : family.workspace_bytes(product, choice, device);
}

std::int64_t num_tickets(const Product& product, const ProductChoice& choice, int device) {
  const ProductFamily& family = family_of(choice);
  return choice.splits == 1 ? 0 : family.num_tickets(product, choice, device);
}

void compute(const Product& product, const ProductChoice& choice, void* workspace,
             std::uint32_t* tickets, int device, void* stream) {
  const ProductFamily& family = family_of(choice);
  check_sizes(product);
  core::require(family.takes(product, choice.kernel), "product: ", choice.kernel, " computes no ",
                product.symmetric ? "symmetric" : "full", " product with ",
                product.a_transposed ? "transposed" : "straight", " a and ",
                product.b_transposed ? "transposed" : "straight", " b");
  if (product.batch == 0 || product.m == 0 || product.cols() == 0) return;
  check(product);
  if (workspace_bytes(product, choice, device) > 0) check_scratch(choice, workspace, tickets);
  family.launch(product, choice, workspace, tickets, device, stream);
}

}  // namespace dmuon::kernels::cuda
