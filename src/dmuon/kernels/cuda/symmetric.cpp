#include "dmuon/kernels/cuda/symmetric.h"

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

std::array<const SymmetricFamily*, 2> families() { return {&symmetric90(), &symmetric80()}; }

const SymmetricFamily& family_of(const SymmetricChoice& choice) {
  const auto all = families();
  const auto* const found = std::ranges::find_if(
      all, [&](const SymmetricFamily* family) { return family->has(choice.kernel); });
  core::require(found != all.end(),
                "symmetric: choice.kernel must be symmetric80_64, symmetric80_128 or symmetric90; "
                "got ",
                choice.kernel);
  const int most = (*found)->max_splits;
  core::require(choice.splits >= 1 && choice.splits <= most,
                "symmetric: choice.splits must be in [1, ", most, "]; got ", choice.splits);
  return **found;
}

void check_matrices(const char* name, const Matrices& x, std::int64_t cols) {
  core::require(x.data != nullptr && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0,
                "symmetric: ", name, " must be an address that is a multiple of 16; got ", x.data);
  core::require(x.row_stride >= cols && x.row_stride % 8 == 0, "symmetric: the row stride of ",
                name, " must be a multiple of 8, at least ", cols, "; got ", x.row_stride);
  core::require(x.batch_stride >= 0 && x.batch_stride % 8 == 0, "symmetric: the batch stride of ",
                name, " must be a multiple of 8, at least 0; got ", x.batch_stride);
}

void check_sizes(const Symmetric& product) {
  for (const auto& [name, size, most] :
       {std::tuple<const char*, std::int64_t, std::int64_t>{"batch", product.batch, kMaxBatch},
        {"m", product.m, kMaxRows},
        {"inner", product.inner, kMaxInner}}) {
    core::require(size >= 0 && size <= most, "symmetric: ", name, " must be in [0, ", most,
                  "]; got ", size);
  }
}

void check(const Symmetric& product, const SymmetricChoice& choice, const void* workspace,
           const std::uint32_t* tickets) {
  if (product.inner > 0) {
    const std::int64_t cols = product.transposed ? product.m : product.inner;
    check_matrices("a", product.a, cols);
    check_matrices("b", product.b, cols);
  }
  if (product.beta != 0) check_matrices("c", product.c, product.m);
  check_matrices("out", {product.out, product.out_row_stride, product.out_batch_stride}, product.m);
  const auto aligned = [](const void* data, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
  };
  core::require(aligned(product.scale, 4),
                "symmetric: scale must be an address that is a multiple of 4; got ", product.scale);
  if (choice.splits == 1) return;
  core::require(workspace != nullptr && aligned(workspace, 16),
                "symmetric: workspace must be an address that is a multiple of 16, because of ",
                choice.splits, " splits; got ", workspace);
  core::require(tickets != nullptr && aligned(tickets, 4),
                "symmetric: tickets must be an address that is a multiple of 4, because of ",
                choice.splits, " splits; got ", tickets);
}

}  // namespace

SymmetricParameters parameters_of(const Symmetric& product) {
  SymmetricParameters p{};
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
  p.one_operand = product.a == product.b;
  p.m = static_cast<int>(product.m);
  p.inner = static_cast<int>(product.inner);
  p.alpha = static_cast<float>(product.alpha);
  p.beta = static_cast<float>(product.beta);
  p.diagonal = static_cast<float>(product.diagonal);
  return p;
}

std::vector<SymmetricChoice> candidates(const Symmetric& product, int device) {
  check_sizes(product);
  std::vector<Estimate> found;
  for (const SymmetricFamily* family : families()) family->add_candidates(found, product, device);
  std::ranges::stable_sort(found, {}, &Estimate::us);
  std::vector<SymmetricChoice> choices;
  for (Estimate& one : found) choices.push_back(std::move(one.choice));
  return choices;
}

std::int64_t workspace_bytes(const Symmetric& product, const SymmetricChoice& choice, int device) {
  const SymmetricFamily& family = family_of(choice);
  return choice.splits == 1 ? 0 : family.workspace_bytes(product, choice, device);
}

std::int64_t num_tickets(const Symmetric& product, const SymmetricChoice& choice, int device) {
  const SymmetricFamily& family = family_of(choice);
  return choice.splits == 1 ? 0 : family.num_tickets(product, choice, device);
}

void symmetric(const Symmetric& product, const SymmetricChoice& choice, void* workspace,
               std::uint32_t* tickets, int device, void* stream) {
  const SymmetricFamily& family = family_of(choice);
  check_sizes(product);
  core::require(!product.transposed || &family == &symmetric90(), "symmetric: ", choice.kernel,
                " takes no transposed operands");
  if (product.batch == 0 || product.m == 0) return;
  check(product, choice, workspace, tickets);
  family.launch(product, choice, workspace, tickets, device, stream);
}

}  // namespace dmuon::kernels::cuda
