#include <algorithm>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/families.h"
#include "dmuon/kernels/cuda/library.h"

namespace dmuon::kernels::cuda {
namespace {

using core::divided_up;

constexpr std::int64_t kTile = std::int64_t{2} * kProduct90Tile;  // a cluster's
constexpr int kMaxRuns = 1024;
constexpr std::int64_t kMostTiles = std::int64_t{1} << 30;
constexpr std::int64_t kPartBytes = kProduct90Tile * kTile * 4;  // sums of a block

// Microseconds, by what an H200 took.
constexpr double kLaunchUs = 6;
constexpr double kStepUs = 0.7;
constexpr double kFinishUs = 3;  // scaling and writing a tile
constexpr double kCutUs = 4;     // of a share that is a part of a tile
constexpr double kPartUs = 2;    // adding a part's sums

std::int64_t num_clusters(int device) {
  return std::max<std::int64_t>(1, num_multiprocessors(device) / 2);
}
std::int64_t num_steps(const Product& product) {
  return divided_up(product.inner, kProduct90Depth);
}

bool has(const std::string& kernel) { return kernel == "product90"; }

bool takes(const Product& product, const std::string&) {
  if (product.inner == 0) return false;  // no step, and a tensor map of nothing
  return product.symmetric ? product.a_transposed == product.b_transposed : !product.a_transposed;
}

// With several runs, the tiles that fill no round of all clusters are cut.
SharesOf shares_of(const Product& product, int num_runs, int device) {
  const std::int64_t tiles = num_tiles(product, kTile);
  const std::int64_t clusters = num_clusters(device);
  SharesOf shares{};
  shares.batch = static_cast<int>(product.batch);
  shares.num_tiles = static_cast<int>(tiles);
  shares.num_whole = static_cast<int>(num_runs == 1 ? tiles : tiles / clusters * clusters);
  shares.num_runs = shares.num_whole == shares.num_tiles ? 0 : num_runs;
  shares.num_steps = static_cast<int>(num_steps(product));
  return shares;
}

std::int64_t num_cut(const SharesOf& shares) { return shares.num_tiles - shares.num_whole; }

// The most runs that touch a tile: one more than fit into it side by side.
std::int64_t most_parts(const SharesOf& shares) {
  const std::int64_t cut = num_cut(shares);
  if (cut == 0) return 0;
  return divided_up(shares.num_runs, cut) + (shares.num_runs % cut == 0 ? 0 : 1);
}

double estimate(const SharesOf& shares, std::int64_t clusters) {
  const std::int64_t rounds = divided_up(std::int64_t{shares.batch} * shares.num_whole, clusters);
  double us = kLaunchUs + static_cast<double>(rounds) * (shares.num_steps * kStepUs + kFinishUs);
  if (shares.num_runs == 0) return us;
  const std::int64_t runs = divided_up(std::int64_t{shares.batch} * shares.num_runs, clusters);
  const double steps = static_cast<double>(num_cut(shares)) * shares.num_steps / shares.num_runs;
  const double parts = kCutUs + static_cast<double>(most_parts(shares)) * kPartUs;
  const bool even = shares.num_runs % num_cut(shares) == 0;  // then a run touches one tile
  return us + static_cast<double>(runs) * (steps * kStepUs + kFinishUs + (even ? 1 : 2) * parts);
}

void add_candidates(std::vector<Estimate>& found, const Product& product, int device) {
  const std::int64_t steps = num_steps(product);
  const std::int64_t tiles = num_tiles(product, kTile);
  const std::int64_t clusters = num_clusters(device);
  if (!has_product90(device) || !takes(product, "product90") || steps == 0 ||
      tiles * product.batch > kMostTiles) {
    return;
  }
  const auto add = [&](std::int64_t runs) {
    found.push_back({estimate(shares_of(product, static_cast<int>(runs), device), clusters),
                     {"product90", static_cast<int>(runs)}});
  };
  add(1);
  const std::int64_t cut = tiles % clusters;
  if (cut == 0 || cut * steps > kMostTiles) return;
  for (const std::int64_t parts : {2, 3, 4, 6}) {
    if (parts * cut <= clusters && 2 * parts <= steps) add(parts * cut);
  }
  if (clusters % cut != 0 && cut * steps >= 4 * clusters) add(clusters);
}

std::int64_t tickets(const Product& product, const ProductChoice& choice, int device) {
  return 2 * product.batch * num_cut(shares_of(product, choice.splits, device));
}

std::int64_t scratch_bytes(const Product& product, const ProductChoice& choice, int device) {
  const SharesOf shares = shares_of(product, choice.splits, device);
  return tickets(product, choice, device) * most_parts(shares) * kPartBytes;
}

TensorMap map_of(const Product& product, const Matrices& x, std::int64_t rows, bool transposed) {
  return tensor_map({.data = x.data,
                     .format = product.format,
                     .batch = product.batch,
                     .rows = transposed ? product.inner : rows,
                     .cols = transposed ? rows : product.inner,
                     .row_stride = x.row_stride,
                     .batch_stride = x.batch_stride,
                     .box_rows = transposed ? kProduct90Depth : kProduct90Tile});
}

const char* kernel_of(const Product& product) {
  const bool fp16 = product.format == Half::kFp16;
  if (product.symmetric) {
    if (product.b_transposed)
      return fp16 ? "symmetric90_transposed_f16" : "symmetric90_transposed_bf16";
    return fp16 ? "symmetric90_f16" : "symmetric90_bf16";
  }
  if (product.b_transposed) return fp16 ? "full90_transposed_f16" : "full90_transposed_bf16";
  return fp16 ? "full90_f16" : "full90_bf16";
}

void launch_one(const Product& product, const ProductChoice& choice, void* workspace,
                std::uint32_t* zeros, int device, void* stream) {
  Product90Parameters parameters{};
  parameters.product = parameters_of(product);
  parameters.product.partial = static_cast<float*>(workspace);
  parameters.product.tickets = zeros;
  parameters.a = map_of(product, product.a, product.m, product.a_transposed);
  parameters.b = product.symmetric && product.a == product.b
                     ? parameters.a
                     : map_of(product, product.b, product.cols(), product.b_transposed);
  parameters.shares = shares_of(product, choice.splits, device);
  core::require(
      parameters.shares.num_runs <= num_cut(parameters.shares) * parameters.shares.num_steps,
      "product: choice.splits must be at most ",
      num_cut(parameters.shares) * parameters.shares.num_steps, ", the steps that are cut; got ",
      choice.splits);
  parameters.most_parts = static_cast<int>(most_parts(parameters.shares));
  const std::int64_t units =
      product.batch * (std::int64_t{parameters.shares.num_whole} + parameters.shares.num_runs);
  const std::int64_t clusters = std::min(num_clusters(device), units);
  launch({.kernel = kernel_of(product),
          .grid_x = static_cast<unsigned>(2 * clusters),
          .grid_y = 1,
          .threads = kProduct90Threads,
          .shared_bytes = 4 * kProduct90SharedWords,
          .begins_early = true},
         &parameters, sizeof parameters, device, stream);
}

}  // namespace

const ProductFamily& product90() {
  static constexpr ProductFamily kFamily{has,           takes,   kMaxRuns,  add_candidates,
                                         scratch_bytes, tickets, launch_one};
  return kFamily;
}

}  // namespace dmuon::kernels::cuda
