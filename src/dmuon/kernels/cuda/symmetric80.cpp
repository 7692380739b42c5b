#include <algorithm>
#include <array>
#include <string_view>

#include "dmuon/kernels/cuda/families.h"
#include "dmuon/kernels/cuda/library.h"

namespace dmuon::kernels::cuda {
namespace {

using core::divided_up;

constexpr int kMaxSplits = 8;  // 2^20 rows have 2^27 tiles, and a tile may have 8 blocks along x
constexpr std::array kSplits{1, 2, 3, 4, 6, kMaxSplits};
constexpr int kBlocksAtOnce = 2;  // of a multiprocessor, as symmetric80.cu asks for
constexpr double kLaunchUs = 4;
constexpr double kSplitUs = 8;   // of parts of sums
constexpr double kFinishUs = 1;  // of a round of blocks
// Multiply-adds of a multiprocessor in a microsecond, by what an H200 took.
constexpr double kRate = 1.1e6;

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

const Form* find(const std::string& kernel) {
  const auto* const found = std::ranges::find(kForms, kernel, &Form::name);
  return found == kForms.end() ? nullptr : found;
}

bool has(const std::string& kernel) { return find(kernel) != nullptr; }

// Rounds of blocks that the device runs at once, times the multiplications of a block.
double estimate(std::int64_t blocks, std::int64_t at_once, std::int64_t steps, int splits,
                const SymmetricTile& shape) {
  const std::int64_t rounds = divided_up(blocks * splits, at_once);
  const auto multiplied =
      static_cast<double>(divided_up(steps, splits) * shape.tile * shape.tile * shape.depth);
  return kLaunchUs + (splits > 1 ? kSplitUs + splits : 0) +
         static_cast<double>(rounds) * (kBlocksAtOnce * multiplied / kRate + kFinishUs);
}

void add_candidates(std::vector<Estimate>& found, const Symmetric& product, int device) {
  if (product.transposed) return;
  const std::int64_t at_once = std::int64_t{kBlocksAtOnce} * num_multiprocessors(device);
  for (const Form& form : kForms) {
    const std::int64_t blocks = num_tiles(product.m, form.shape.tile) * product.batch;
    const std::int64_t steps = divided_up(product.inner, form.shape.depth);
    for (const int splits : kSplits) {
      if (splits > 1 && (blocks * splits > at_once || splits > steps)) break;
      found.push_back(
          {estimate(blocks, at_once, steps, splits, form.shape), {std::string(form.name), splits}});
    }
  }
}

std::int64_t tickets(const Symmetric& product, const SymmetricChoice& choice, int) {
  return product.batch * num_tiles(product.m, find(choice.kernel)->shape.tile);
}

std::int64_t scratch_bytes(const Symmetric& product, const SymmetricChoice& choice, int device) {
  const std::int64_t tile = find(choice.kernel)->shape.tile;
  return tickets(product, choice, device) * choice.splits * tile * tile * 4;
}

void launch_one(const Symmetric& product, const SymmetricChoice& choice, void* workspace,
                std::uint32_t* zeros, int device, void* stream) {
  const Form& form = *find(choice.kernel);
  SymmetricParameters parameters = parameters_of(product);
  parameters.num_tiles = static_cast<int>(num_tiles(product.m, form.shape.tile));
  parameters.splits = choice.splits;
  parameters.partial = static_cast<float*>(workspace);
  parameters.tickets = zeros;
  launch({.kernel = product.format == Half::kFp16 ? form.fp16 : form.bf16,
          .grid_x = static_cast<unsigned>(parameters.num_tiles * choice.splits),
          .grid_y = static_cast<unsigned>(product.batch),
          .threads = static_cast<unsigned>(form.shape.threads()),
          .shared_bytes = static_cast<unsigned>(form.shape.shared_bytes())},
         &parameters, sizeof parameters, device, stream);
}

}  // namespace

const SymmetricFamily& symmetric80() {
  static constexpr SymmetricFamily kFamily{has,           kMaxSplits, add_candidates,
                                           scratch_bytes, tickets,    launch_one};
  return kFamily;
}

}  // namespace dmuon::kernels::cuda
