#include "dmuon/kernels/cuda/symmetric.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/library.h"

namespace dmuon::kernels::cuda {
namespace {

constexpr std::int64_t kMaxBatch = 65535;  // blocks along y
constexpr std::int64_t kMaxRows = std::int64_t{1} << 20;
constexpr std::int64_t kMaxInner = std::int64_t{1} << 30;
constexpr int kMaxSplits = 8;  // 2^20 rows have 2^27 tiles, and a tile may have 8 blocks along x
constexpr std::array kSplits{1, 2, 3, 4, 6, kMaxSplits};
constexpr int kBlocksAtOnce = 2;  // of a multiprocessor, as symmetric80.cu asks for

struct Form {
  std::string_view name;
  const char* fp16;  // kernels of the library
  const char* bf16;
  SymmetricTile shape;
};
constexpr std::array kForms{
    Form{"symmetric80_128", "symmetric80_128_f16", "symmetric80_128_bf16", kSymmetric80Large},
    Form{"symmetric80_64", "symmetric80_64_f16", "symmetric80_64_bf16", kSymmetric80Small},
};

const Form& form_of(const SymmetricChoice& choice) {
  const auto* const found = std::ranges::find(kForms, choice.kernel, &Form::name);
  core::require(found != kForms.end(),
                "symmetric: choice.kernel must be symmetric80_128 or symmetric80_64; got ",
                choice.kernel);
  core::require(choice.splits >= 1 && choice.splits <= kMaxSplits,
                "symmetric: choice.splits must be in [1, ", kMaxSplits, "]; got ", choice.splits);
  return *found;
}

std::int64_t divided_up(std::int64_t count, std::int64_t by) { return (count + by - 1) / by; }

// Tiles of the lower triangle.
std::int64_t num_tiles(std::int64_t m, int tile) {
  const std::int64_t rows = divided_up(m, tile);
  return rows * (rows + 1) / 2;
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
    check_matrices("a", product.a, product.inner);
    check_matrices("b", product.b, product.inner);
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

SymmetricParameters parameters_of(const Symmetric& product, const SymmetricTile& shape) {
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
  p.num_tiles = static_cast<int>(num_tiles(product.m, shape.tile));
  p.alpha = static_cast<float>(product.alpha);
  p.beta = static_cast<float>(product.beta);
  p.diagonal = static_cast<float>(product.diagonal);
  return p;
}

// Rounds of blocks that the device runs at once, times the multiplications of a block.
std::int64_t estimate(std::int64_t blocks, std::int64_t at_once, std::int64_t steps, int splits,
                      const SymmetricTile& shape) {
  return divided_up(blocks * splits, at_once) * divided_up(steps, splits) * shape.tile *
         shape.tile * shape.depth;
}

}  // namespace

std::vector<SymmetricChoice> candidates(const Symmetric& product, int device) {
  check_sizes(product);
  const std::int64_t at_once = std::int64_t{kBlocksAtOnce} * num_multiprocessors(device);
  std::vector<std::pair<std::int64_t, SymmetricChoice>> found;
  for (const Form& form : kForms) {
    const std::int64_t blocks = num_tiles(product.m, form.shape.tile) * product.batch;
    const std::int64_t steps = divided_up(product.inner, form.shape.depth);
    for (const int splits : kSplits) {
      if (splits > 1 && (blocks * splits > at_once || splits > steps)) break;
      found.emplace_back(estimate(blocks, at_once, steps, splits, form.shape),
                         SymmetricChoice{std::string(form.name), splits});
    }
  }
  std::ranges::stable_sort(found, {}, [](const auto& one) { return one.first; });
  std::vector<SymmetricChoice> choices;
  for (auto& [time, choice] : found) choices.push_back(std::move(choice));
  return choices;
}

std::int64_t workspace_bytes(const Symmetric& product, const SymmetricChoice& choice) {
  const std::int64_t tile = form_of(choice).shape.tile;
  return num_tickets(product, choice) * choice.splits * tile * tile * 4;
}

std::int64_t num_tickets(const Symmetric& product, const SymmetricChoice& choice) {
  const Form& form = form_of(choice);
  return choice.splits == 1 ? 0 : product.batch * num_tiles(product.m, form.shape.tile);
}

void symmetric(const Symmetric& product, const SymmetricChoice& choice, void* workspace,
               std::uint32_t* tickets, int device, void* stream) {
  const Form& form = form_of(choice);
  check_sizes(product);
  if (product.batch == 0 || product.m == 0) return;
  check(product, choice, workspace, tickets);
  SymmetricParameters parameters = parameters_of(product, form.shape);
  parameters.splits = choice.splits;
  parameters.partial = static_cast<float*>(workspace);
  parameters.tickets = tickets;
  launch({.kernel = product.format == Half::kFp16 ? form.fp16 : form.bf16,
          .grid_x = static_cast<unsigned>(parameters.num_tiles * choice.splits),
          .grid_y = static_cast<unsigned>(product.batch),
          .threads = static_cast<unsigned>(form.shape.threads()),
          .shared_bytes = static_cast<unsigned>(form.shape.shared_bytes())},
         &parameters, sizeof parameters, device, stream);
}

}  // namespace dmuon::kernels::cuda
