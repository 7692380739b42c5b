#include "tests/kernels/cuda/fake/registry.h"

#include <algorithm>

#include "dmuon/kernels/cuda/direction.h"
#include "dmuon/kernels/cuda/move_weights.h"
#include "dmuon/kernels/cuda/multiply.h"
#include "dmuon/kernels/cuda/product80.h"
#include "dmuon/kernels/cuda/product90.h"
#include "dmuon/kernels/cuda/write_scalars.h"

namespace dmuon::kernels::cuda::fake {
namespace {

using device::BFloat16;
using device::Fp16;
using device::FullResult;
using device::SymmetricResult;
using emulator::Access;
using emulator::Buffer;

Buffer matrices(const char* name, const void* base, std::size_t entry_bytes, std::size_t batch,
                int rows, int cols, std::int64_t row_stride, std::int64_t batch_stride,
                Access access) {
  return {.name = name,
          .base = base,
          .row_bytes = static_cast<std::size_t>(cols) * entry_bytes,
          .rows = static_cast<std::size_t>(rows),
          .row_pitch = static_cast<std::size_t>(row_stride) * entry_bytes,
          .batch = batch,
          .batch_pitch = static_cast<std::size_t>(batch_stride) * entry_bytes,
          .access = access};
}

Buffer array(const char* name, const void* base, std::size_t bytes, Access access) {
  return {.name = name, .base = base, .row_bytes = bytes, .access = access};
}

using ToHost = std::optional<std::ptrdiff_t>;

// A value in the device's memory.
template <typename T>
T value_at(const T* address, std::ptrdiff_t to_host) {
  return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(address) + to_host);
}

std::vector<Buffer> scalars_buffers(const void* parameters, unsigned, ToHost) {
  const auto& p = *static_cast<const ScalarsParameters*>(parameters);
  return {array("scalars", p.out, 4 * static_cast<std::size_t>(p.count), Access::kWrite)};
}

std::vector<Buffer> move_weights_buffers(const void* parameters, unsigned batch, ToHost to_host) {
  const auto& p = *static_cast<const MoveWeightsParameters*>(parameters);
  std::vector<Buffer> buffers{array("applies", p.applies, 1, Access::kRead)};
  if (to_host && value_at(p.applies, *to_host) == 0) return buffers;
  buffers.push_back(array("decay", p.decay, 4, Access::kRead));
  buffers.push_back(array("factor", p.factor, 4, Access::kRead));
  const auto inner_batch = static_cast<unsigned>(p.inner_batch);
  for (unsigned inner = 0; inner < std::min(inner_batch, batch); ++inner) {
    const std::size_t outer = (batch - inner + inner_batch - 1) / inner_batch;
    buffers.push_back(matrices("w", p.w + inner * p.w_inner_stride, 4, outer, p.rows, p.cols,
                               p.w_row_stride, p.w_batch_stride, Access::kUpdate));
    if (inner == 0 && p.scales != nullptr)
      buffers.push_back(
          matrices("scales", p.scales, 4, batch, 1, 1, 0, p.scale_stride, Access::kRead));
    buffers.push_back(matrices("u", p.u + inner * p.u_inner_stride, 2, outer, p.rows, p.cols,
                               p.u_row_stride, p.u_batch_stride, Access::kRead));
  }
  return buffers;
}

std::vector<Buffer> multiply_buffers(const void* parameters, unsigned batch, ToHost) {
  const auto& p = *static_cast<const MultiplyParameters*>(parameters);
  const std::size_t bytes = std::size_t{batch} * static_cast<std::size_t>(p.num_eights) * 16;
  return {array("x", p.x, bytes, Access::kUpdate),
          matrices("factors", p.factors, 4, batch, 1, 1, 0, p.factor_stride, Access::kRead)};
}

// What the kernels touch of one matrix. The second one may find that there is nothing to do.
void direction_buffers_of(const DirectionParameters& p, int matrix, bool again, ToHost to_host,
                          std::vector<Buffer>& buffers) {
  const float* const memo = p.memo + std::ptrdiff_t{matrix} * kMemoWords;
  buffers.push_back(array("memo", memo, 4 * kMemoWords, Access::kChanges));
  if (to_host && again &&
      value_at(memo + kMemoGuess, *to_host) == value_at(memo + kMemoScale, *to_host)) {
    return;
  }
  if (p.squares != nullptr)
    buffers.push_back(array("squares", p.squares + matrix, 4, Access::kChanges));
  const std::int64_t at =
      matrix / p.inner_batch * p.batch_stride + matrix % p.inner_batch * p.inner_stride;
  const auto part = [&](const char* name, const float* base, Access access) {
    buffers.push_back(matrices(name, base + at, 4, 1, p.rows, p.cols, p.row_stride, 0, access));
  };
  part("gradient", p.gradient, Access::kRead);
  const bool moves = !again && (!to_host || value_at(p.applies, *to_host) != 0);
  part("momentum", p.momentum, moves ? Access::kUpdate : Access::kRead);
  const std::int64_t x_size = std::int64_t{p.x_rows} * p.x_cols;
  buffers.push_back(
      array("x", p.x + matrix * x_size, 2 * static_cast<std::size_t>(x_size), Access::kWrite));
  buffers.push_back(array("partial", p.partial + std::ptrdiff_t{2} * matrix * p.num_parts,
                          8 * static_cast<std::size_t>(p.num_parts), Access::kChanges));
}

template <bool kAgain>
std::vector<Buffer> direction_buffers(const void* parameters, unsigned batch, ToHost to_host) {
  const auto& p = *static_cast<const DirectionParameters*>(parameters);
  std::vector<Buffer> buffers{array("applies", p.applies, 1, Access::kRead),
                              array("rest", p.rest, 4, Access::kRead)};
  if (p.gradient_factor != nullptr)
    buffers.push_back(array("gradient factor", p.gradient_factor, 4, Access::kRead));
  for (unsigned matrix = 0; matrix < batch; ++matrix)
    direction_buffers_of(p, static_cast<int>(matrix), kAgain, to_host, buffers);
  return buffers;
}

// Matrices of weights that a launch moves: one buffer for each inner one.
void add_weights(std::vector<Buffer>& buffers, float* w, std::int64_t inner_batch,
                 std::int64_t first, std::int64_t batch, int rows, int cols,
                 std::int64_t row_stride, std::int64_t inner_stride, std::int64_t batch_stride) {
  for (std::int64_t inner = 0; inner < inner_batch; ++inner) {
    const std::int64_t begin = (first + inner_batch - 1 - inner) / inner_batch;  // outer ones
    const std::int64_t end = (first + batch + inner_batch - 1 - inner) / inner_batch;
    if (begin == end) continue;
    buffers.push_back(matrices("w", w + inner * inner_stride + begin * batch_stride, 4,
                               static_cast<std::size_t>(end - begin), rows, cols, row_stride,
                               batch_stride, Access::kUpdate));
  }
}

// Operands and results of products; b is [inner, n] if it lies transposed.
std::vector<Buffer> product_buffers(const ProductParameters& p, unsigned batch, bool a_transposed,
                                    bool b_transposed, ToHost to_host) {
  std::vector<Buffer> buffers;
  const MovedWeights& w = p.weights;
  if (w.w != nullptr) {
    buffers.push_back(array("applies", w.applies, 1, Access::kRead));
    if (to_host && value_at(w.applies, *to_host) == 0) return buffers;
    buffers.push_back(array("decay", w.decay, 4, Access::kRead));
    buffers.push_back(array("factor", w.factor, 4, Access::kRead));
    add_weights(buffers, w.w, w.inner_batch, w.first, batch, w.rows, w.cols, w.row_stride,
                w.inner_stride, w.batch_stride);
    if (w.scales != nullptr) {
      buffers.push_back(matrices("scales", w.scales + w.first * w.scale_stride, 4, batch, 1, 1, 0,
                                 w.scale_stride, Access::kRead));
    }
  }
  const auto add = [&](const char* name, const void* base, int rows, int cols,
                       std::int64_t row_stride, std::int64_t batch_stride, Access access) {
    if (base == nullptr) return;
    buffers.push_back(matrices(name, base, 2, batch, rows, cols, row_stride, batch_stride, access));
  };
  const auto add_operand = [&](const char* name, const void* base, int rows, bool transposed,
                               std::int64_t row_stride, std::int64_t batch_stride) {
    add(name, base, transposed ? p.inner : rows, transposed ? rows : p.inner, row_stride,
        batch_stride, Access::kRead);
  };
  add_operand("a", p.a, p.m, a_transposed, p.a_row_stride, p.a_batch_stride);
  if (!p.one_operand) add_operand("b", p.b, p.n, b_transposed, p.b_row_stride, p.b_batch_stride);
  add("c", p.c, p.m, p.n, p.c_row_stride, p.c_batch_stride, Access::kRead);
  if (w.w == nullptr)
    add("out", p.out, p.m, p.n, p.out_row_stride, p.out_batch_stride, Access::kWrite);
  if (p.scale != nullptr) buffers.push_back(array("scale", p.scale, 4 * batch, Access::kRead));
  return buffers;
}

template <int kTile>
std::vector<Buffer> product80_buffers(const void* parameters, unsigned batch, ToHost to_host) {
  const auto& p = *static_cast<const ProductParameters*>(parameters);
  std::vector<Buffer> buffers = product_buffers(p, batch, false, p.b_transposed, to_host);
  if (p.splits > 1) {
    const std::size_t tiles = std::size_t{batch} * static_cast<std::size_t>(p.num_tiles);
    const std::size_t sums = tiles * static_cast<std::size_t>(p.splits) * kTile * kTile;
    buffers.push_back(array("partial", p.partial, 4 * sums, Access::kChanges));
    buffers.push_back(array("tickets", p.tickets, 4 * tiles, Access::kChanges));
  }
  return buffers;
}

template <bool kTransposedA, bool kTransposedB>
std::vector<Buffer> product90_buffers(const void* parameters, unsigned, ToHost to_host) {
  const auto& p = *static_cast<const Product90Parameters*>(parameters);
  const SharesOf& shares = p.shares;
  std::vector<Buffer> buffers = product_buffers(p.product, static_cast<unsigned>(shares.batch),
                                                kTransposedA, kTransposedB, to_host);
  // Of the two blocks of each tile that is cut.
  const auto halves = 2 * static_cast<std::size_t>(shares.batch) *
                      static_cast<std::size_t>(shares.num_tiles - shares.num_whole);
  if (halves == 0) return buffers;
  const std::size_t sums =
      halves * static_cast<std::size_t>(p.most_parts) * kProduct90Tile * 2 * kProduct90Tile;
  buffers.push_back(array("partial", p.product.partial, 4 * sums, Access::kChanges));
  buffers.push_back(array("tickets", p.product.tickets, 4 * halves, Access::kChanges));
  return buffers;
}

template <typename Parameters, void (*kBody)(const Parameters&)>
HostKernel kernel(decltype(HostKernel::buffers) buffers) {
  return {sizeof(Parameters),
          [](const void* parameters) { kBody(*static_cast<const Parameters*>(parameters)); },
          buffers};
}

template <typename Format, ProductTile kShape, typename Result>
HostKernel product80() {
  return kernel<ProductParameters, device::Product80<Format, kShape, Result>::run>(
      product80_buffers<kShape.tile>);
}

template <typename Format, bool kTransposedA, bool kTransposedB, typename Result>
HostKernel product90() {
  return kernel<Product90Parameters,
                device::Product90<Format, kTransposedA, kTransposedB, Result>::run>(
      product90_buffers<kTransposedA, kTransposedB>);
}

}  // namespace

const std::map<std::string, HostKernel>& kernels() {
  static const std::map<std::string, HostKernel> kKernels{
      {"write_scalars", kernel<ScalarsParameters, device::write_scalars>(scalars_buffers)},
      {"move_weights_f16",
       kernel<MoveWeightsParameters, device::MoveWeights<device::Fp16>::run>(move_weights_buffers)},
      {"move_weights_bf16",
       kernel<MoveWeightsParameters, device::MoveWeights<device::BFloat16>::run>(
           move_weights_buffers)},
      {"multiply_f16",
       kernel<MultiplyParameters, device::multiply<device::Fp16>>(multiply_buffers)},
      {"multiply_bf16",
       kernel<MultiplyParameters, device::multiply<device::BFloat16>>(multiply_buffers)},
      {"direction_f16",
       kernel<DirectionParameters, device::Direction<device::Fp16>::run>(direction_buffers<false>)},
      {"direction_bf16", kernel<DirectionParameters, device::Direction<device::BFloat16>::run>(
                             direction_buffers<false>)},
      {"direction_again_f16",
       kernel<DirectionParameters, device::Direction<device::Fp16>::run_again>(
           direction_buffers<true>)},
      {"direction_again_bf16",
       kernel<DirectionParameters, device::Direction<device::BFloat16>::run_again>(
           direction_buffers<true>)},
      {"symmetric80_128_f16", product80<Fp16, kProduct80Large, SymmetricResult>()},
      {"symmetric80_128_bf16", product80<BFloat16, kProduct80Large, SymmetricResult>()},
      {"symmetric80_64_f16", product80<Fp16, kProduct80Small, SymmetricResult>()},
      {"symmetric80_64_bf16", product80<BFloat16, kProduct80Small, SymmetricResult>()},
      {"full80_128_f16", product80<Fp16, kProduct80Large, FullResult>()},
      {"full80_128_bf16", product80<BFloat16, kProduct80Large, FullResult>()},
      {"symmetric90_f16", product90<Fp16, false, false, SymmetricResult>()},
      {"symmetric90_bf16", product90<BFloat16, false, false, SymmetricResult>()},
      {"symmetric90_transposed_f16", product90<Fp16, true, true, SymmetricResult>()},
      {"symmetric90_transposed_bf16", product90<BFloat16, true, true, SymmetricResult>()},
      {"full90_f16", product90<Fp16, false, false, FullResult>()},
      {"full90_bf16", product90<BFloat16, false, false, FullResult>()},
      {"full90_transposed_f16", product90<Fp16, false, true, FullResult>()},
      {"full90_transposed_bf16", product90<BFloat16, false, true, FullResult>()},
  };
  return kKernels;
}

}  // namespace dmuon::kernels::cuda::fake
