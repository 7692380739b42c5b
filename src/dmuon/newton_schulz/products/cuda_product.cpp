#include "dmuon/newton_schulz/products/cuda_product.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/kernels/cuda/library.h"
#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::newton_schulz::cuda {
namespace {

using at::Tensor;
namespace gpu = kernels::cuda;

// Matrices with a shorter side go through the iteration in batches, of about this many.
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

// Sets a and b'. Returns false if the kernels do not read them as they lie.
bool set_operands(gpu::Product& product, const Tensor& a, const Tensor& b) {
  const auto set = [&](const Tensor& left, const Tensor& right, bool left_lies, bool right_lies) {
    product.a = matrices(left);
    product.b = matrices(right);
    product.a_transposed = left_lies;
    product.b_transposed = right_lies;
    return true;
  };
  const Tensor other = b.mT();
  if (!product.symmetric) {
    if (!has_rows(a)) return false;
    if (has_rows(b)) return set(a, b, false, true);
    return has_rows(other) && set(a, other, false, false);
  }
  // Rows of b' are those of X for X X', and b's own if b is symmetric itself.
  const bool is_symmetric = a.size(-1) == a.size(-2) && has_rows(a) && has_rows(b);
  if (is_symmetric) return set(a, b, false, false);
  if (has_rows(a) && has_rows(other)) return set(a, other, false, false);
  return has_rows(a.mT()) && has_rows(b) && set(a.mT(), b, true, true);
}

// The matrices [first, first + count) of the batch.
gpu::Product part_of(gpu::Product product, std::int64_t first, std::int64_t count) {
  const auto moved = [&](const void* data, std::int64_t batch_stride) {
    return static_cast<const std::uint16_t*>(data) + first * batch_stride;
  };
  for (gpu::Matrices* x : {&product.a, &product.b, &product.c})
    if (x->data != nullptr) x->data = moved(x->data, x->batch_stride);
  if (product.out != nullptr)
    product.out = static_cast<std::uint16_t*>(product.out) + first * product.out_batch_stride;
  if (product.scale != nullptr) product.scale += first;
  product.weights.first += static_cast<int>(first);
  product.batch = count;
  return product;
}

// The same for a matrix alone and in a batch, for equal bits. Small ones come in batches.
const std::optional<gpu::ProductChoice>& choice_for(const gpu::Product& product, int device) {
  using Key = std::tuple<int, bool, std::int64_t, std::int64_t, std::int64_t, bool, bool>;
  thread_local std::map<Key, std::optional<gpu::ProductChoice>> known;
  const Key key{device,        product.symmetric,    product.m,           product.cols(),
                product.inner, product.a_transposed, product.b_transposed};
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  gpu::Product usual = product;
  const bool is_small = std::min(product.m, product.cols()) < kSmall;
  usual.batch = is_small ? kUsualBatch : 1;
  std::vector<gpu::ProductChoice> choices = gpu::candidates(usual, device);
  // A batch fills the device without splits, which cost memory's time.
  if (is_small) std::erase_if(choices, [](const auto& one) { return one.splits > 1; });
  std::optional<gpu::ProductChoice> choice;
  if (!choices.empty()) choice = std::move(choices.front());
  return known.emplace(key, std::move(choice)).first->second;
}

}  // namespace

std::optional<gpu::Product> described(Kind kind, const Operands& operands) {
  const auto& [beta, c, alpha, a, b] = operands;
  const auto format = half_of(a.scalar_type());
  if (!format || (beta != 0 && !has_rows(c))) return std::nullopt;
  gpu::Product product{.symmetric = kind == Kind::kSymmetric,
                       .batch = a.dim() == 2 ? 1 : a.size(0),
                       .m = a.size(-2),
                       .n = b.size(-1),
                       .inner = a.size(-1),
                       .format = *format,
                       .alpha = alpha,
                       .beta = beta};
  if (!set_operands(product, a, b)) return std::nullopt;
  if (beta != 0) product.c = matrices(c);
  return product;
}

bool write_to(gpu::Product& product, const Tensor& out, const Operands& operands) {
  if (!has_rows(out) || (operands.beta != 0 && operands.c.is_same(out))) return false;
  product.out = out.mutable_data_ptr();
  product.out_row_stride = out.stride(-2);
  product.out_batch_stride = out.dim() == 2 ? 0 : out.stride(0);
  return true;
}

bool compute(const gpu::Product& product, const Tensor& like) {
  const std::optional<gpu::ProductChoice>& choice = choice_for(product, like.device().index());
  if (choice) compute_by(*choice, product, like);
  return choice.has_value();
}

// A batch that is cut goes in parts that share scratch memory.
void compute_by(const gpu::ProductChoice& choice, const gpu::Product& product, const Tensor& like) {
  const int device = like.device().index();
  void* const stream = current_stream(like.device());
  gpu::Product one = product;
  one.batch = 1;
  const std::int64_t bytes = gpu::workspace_bytes(one, choice, device);
  if (bytes == 0) return gpu::compute(product, choice, nullptr, nullptr, device, stream);
  const std::int64_t tickets = gpu::num_tickets(one, choice, device);
  const std::int64_t at_once = std::clamp(kMostScratch / bytes, std::int64_t{1}, product.batch);
  const auto words = like.options().dtype(at::kInt);
  const Tensor workspace = scratch_tensor({at_once * bytes / 4}, words);
  // A product in a graph of PyTorch's has zeros of its own, which that graph clears.
  const Tensor zeros = gpu::is_captured(stream) && !uses_scratch()
                           ? at::zeros({at_once * tickets}, words)
                           : kept_zeros(at_once * tickets, words, stream);
  for (std::int64_t first = 0; first < product.batch; first += at_once) {
    gpu::compute(part_of(product, first, std::min(at_once, product.batch - first)), choice,
                 workspace.mutable_data_ptr(),
                 static_cast<std::uint32_t*>(zeros.mutable_data_ptr()), device, stream);
  }
}

}  // namespace dmuon::newton_schulz::cuda
