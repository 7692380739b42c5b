#include <algorithm>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/families.h"
#include "dmuon/kernels/cuda/library.h"

namespace dmuon::kernels::cuda {
namespace {

using core::divided_up;

constexpr std::int64_t kTile = std::int64_t{2} * kSymmetric90Tile;  // a cluster's
constexpr int kMaxRuns = 1024;
constexpr std::int64_t kMostTiles = std::int64_t{1} << 30;
constexpr std::int64_t kPartBytes = kSymmetric90Tile * kTile * 4;  // sums of a block

// Microseconds, by what an H200 took.
constexpr double kLaunchUs = 6;
constexpr double kStepUs = 0.7;
constexpr double kFinishUs = 3;  // scaling and writing a tile
constexpr double kCutUs = 4;     // of a share that is a part of a tile
constexpr double kPartUs = 2;    // adding a part's sums

std::int64_t num_clusters(int device) { return num_multiprocessors(device) / 2; }
std::int64_t num_steps(const Symmetric& product) {
  return divided_up(product.inner, kSymmetric90Depth);
}

bool has(const std::string& kernel) { return kernel == "symmetric90"; }

// With several runs, the tiles that fill no round of all clusters are cut.
SharesOf shares_of(const Symmetric& product, int num_runs, int device) {
  const std::int64_t tiles = num_tiles(product.m, kTile);
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

void add_candidates(std::vector<Estimate>& found, const Symmetric& product, int device) {
  const std::int64_t steps = num_steps(product);
  const std::int64_t tiles = num_tiles(product.m, kTile);
  const std::int64_t clusters = num_clusters(device);
  if (!has_symmetric90(device) || steps == 0 || tiles * product.batch > kMostTiles) return;
  const auto add = [&](std::int64_t runs) {
    found.push_back({estimate(shares_of(product, static_cast<int>(runs), device), clusters),
                     {"symmetric90", static_cast<int>(runs)}});
  };
  add(1);
  const std::int64_t cut = tiles % clusters;
  if (cut == 0 || cut * steps > kMostTiles) return;
  for (const std::int64_t parts : {2, 3, 4, 6}) {
    if (parts * cut <= clusters && 2 * parts <= steps) add(parts * cut);
  }
  if (clusters % cut != 0 && cut * steps >= 4 * clusters) add(clusters);
}

std::int64_t tickets(const Symmetric& product, const SymmetricChoice& choice, int device) {
  return 2 * product.batch * num_cut(shares_of(product, choice.splits, device));
}

std::int64_t scratch_bytes(const Symmetric& product, const SymmetricChoice& choice, int device) {
  const SharesOf shares = shares_of(product, choice.splits, device);
  return tickets(product, choice, device) * most_parts(shares) * kPartBytes;
}

void launch_one(const Symmetric& product, const SymmetricChoice& choice, void* workspace,
                std::uint32_t* zeros, int device, void* stream) {
  Symmetric90Parameters parameters{};
  parameters.product = parameters_of(product);
  parameters.product.partial = static_cast<float*>(workspace);
  parameters.product.tickets = zeros;
  const bool transposed = product.transposed;
  const auto map = [&](const Matrices& x) {
    return tensor_map({.data = x.data,
                       .format = product.format,
                       .batch = product.batch,
                       .rows = transposed ? product.inner : product.m,
                       .cols = transposed ? product.m : product.inner,
                       .row_stride = x.row_stride,
                       .batch_stride = x.batch_stride,
                       .box_rows = transposed ? kSymmetric90Depth : kSymmetric90Tile});
  };
  parameters.a = map(product.a);
  parameters.b = product.a == product.b ? parameters.a : map(product.b);
  parameters.shares = shares_of(product, choice.splits, device);
  core::require(
      parameters.shares.num_runs <= num_cut(parameters.shares) * parameters.shares.num_steps,
      "symmetric: choice.splits must be at most ",
      num_cut(parameters.shares) * parameters.shares.num_steps, ", the steps that are cut; got ",
      choice.splits);
  parameters.most_parts = static_cast<int>(most_parts(parameters.shares));
  const std::int64_t units =
      product.batch * (std::int64_t{parameters.shares.num_whole} + parameters.shares.num_runs);
  const std::int64_t clusters = std::min(num_clusters(device), units);
  const bool fp16 = product.format == Half::kFp16;
  const char* const straight = fp16 ? "symmetric90_f16" : "symmetric90_bf16";
  const char* const across = fp16 ? "symmetric90_transposed_f16" : "symmetric90_transposed_bf16";
  launch({.kernel = transposed ? across : straight,
          .grid_x = static_cast<unsigned>(2 * clusters),
          .grid_y = 1,
          .threads = kSymmetric90Threads,
          .shared_bytes = 4 * kSymmetric90SharedWords,
          .begins_early = true},
         &parameters, sizeof parameters, device, stream);
}

}  // namespace

const SymmetricFamily& symmetric90() {
  static constexpr SymmetricFamily kFamily{has,           kMaxRuns, add_candidates,
                                           scratch_bytes, tickets,  launch_one};
  return kFamily;
}

}  // namespace dmuon::kernels::cuda
