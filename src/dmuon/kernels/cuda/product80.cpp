#include <algorithm>
#include <array>
#include <string_view>

#include "dmuon/kernels/cuda/families.h"
#include "dmuon/kernels/cuda/library.h"

namespace dmuon::kernels::cuda {
namespace {

using core::divided_up;

// The most tiles are 2^27 of 64 x 64 in a triangle, and a tile may have 8 blocks along x.
constexpr int kMaxSplits = 8;
constexpr std::array kSplits{1, 2, 3, 4, 6, kMaxSplits};
constexpr int kBlocksAtOnce = 2;  // of a multiprocessor, as symmetric80.cu asks for
constexpr double kLaunchUs = 4;
constexpr double kSplitUs = 8;   // of parts of sums
constexpr double kFinishUs = 1;  // of a round of blocks
// Multiply-adds of a multiprocessor in a microsecond, by what an H200 took.
constexpr double kRate = 1.1e6;

// Kernels of the library; null: none.
struct Kernels {
  const char* fp16;
  const char* bf16;
};
struct Form {
  std::string_view name;
  ProductTile shape;
  Kernels symmetric;
  Kernels full;

  const Kernels& of(const Product& product) const { return product.symmetric ? symmetric : full; }
};
constexpr std::array kForms{
    Form{"product80_128",
         kProduct80Large,
         {"symmetric80_128_f16", "symmetric80_128_bf16"},
         {"full80_128_f16", "full80_128_bf16"}},
    Form{"product80_64",
         kProduct80Small,
         {"symmetric80_64_f16", "symmetric80_64_bf16"},
         {nullptr, nullptr}},
};

const Form* find(const std::string& kernel) {
  const auto* const found = std::ranges::find(kForms, kernel, &Form::name);
  return found == kForms.end() ? nullptr : found;
}

bool has(const std::string& kernel) { return find(kernel) != nullptr; }

bool takes(const Product& product, const std::string& kernel) {
  const bool has_layout = !product.a_transposed && (!product.b_transposed || !product.symmetric);
  return has_layout && find(kernel)->of(product).fp16 != nullptr;
}

// Rounds of blocks that the device runs at once, times the multiplications of a block.
double estimate(std::int64_t blocks, std::int64_t at_once, std::int64_t steps, int splits,
                const ProductTile& shape) {
  const std::int64_t rounds = divided_up(blocks * splits, at_once);
  const auto multiplied =
      static_cast<double>(divided_up(steps, splits) * shape.tile * shape.tile * shape.depth);
  return kLaunchUs + (splits > 1 ? kSplitUs + splits : 0) +
         static_cast<double>(rounds) * (kBlocksAtOnce * multiplied / kRate + kFinishUs);
}

void add_candidates(std::vector<Estimate>& found, const Product& product, int device) {
  const std::int64_t at_once = std::int64_t{kBlocksAtOnce} * num_multiprocessors(device);
  for (const Form& form : kForms) {
    if (!takes(product, std::string(form.name))) continue;
    const std::int64_t blocks = num_tiles(product, form.shape.tile) * product.batch;
    const std::int64_t steps = divided_up(product.inner, form.shape.depth);
    for (const int splits : kSplits) {
      if (splits > 1 && (blocks * splits > at_once || splits > steps)) break;
      found.push_back(
          {estimate(blocks, at_once, steps, splits, form.shape), {std::string(form.name), splits}});
    }
  }
}

std::int64_t tickets(const Product& product, const ProductChoice& choice, int) {
  return product.batch * num_tiles(product, find(choice.kernel)->shape.tile);
}

std::int64_t scratch_bytes(const Product& product, const ProductChoice& choice, int device) {
  const std::int64_t tile = find(choice.kernel)->shape.tile;
  return tickets(product, choice, device) * choice.splits * tile * tile * 4;
}

void launch_one(const Product& product, const ProductChoice& choice, void* workspace,
                std::uint32_t* zeros, int device, void* stream) {
  const Form& form = *find(choice.kernel);
  ProductParameters parameters = parameters_of(product);
  parameters.num_tiles = static_cast<int>(num_tiles(product, form.shape.tile));
  parameters.splits = choice.splits;
  parameters.partial = static_cast<float*>(workspace);
  parameters.tickets = zeros;
  const Kernels& kernels = form.of(product);
  launch({.kernel = product.format == Half::kFp16 ? kernels.fp16 : kernels.bf16,
          .grid_x = static_cast<unsigned>(parameters.num_tiles * choice.splits),
          .grid_y = static_cast<unsigned>(product.batch),
          .threads = static_cast<unsigned>(form.shape.threads()),
          .shared_bytes = static_cast<unsigned>(form.shape.shared_bytes())},
         &parameters, sizeof parameters, device, stream);
}

}  // namespace

const ProductFamily& product80() {
  static constexpr ProductFamily kFamily{has,           takes,   kMaxSplits, add_candidates,
                                         scratch_bytes, tickets, launch_one};
  return kFamily;
}

}  // namespace dmuon::kernels::cuda
