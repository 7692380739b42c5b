// The agreement of a step: one message over all ranks, an elementwise maximum of fp64 words,
// because every word is either a flag or is known to one rank alone:
//
//   [0, 4)        the hash of what was issued, in 16-bit parts: the largest of each
//   [4, 8)        the same negated: minus the smallest of each
//   [8, 10)       the digest of the settings: the largest, and minus the smallest
//   [10]          1 if this rank holds a gradient that is not finite
//   [11, 11+n)    1 if this rank had a gradient of the matrix
//   [11+n, 11+2n) the squared norm of the matrix's mean gradient, at its owner; else 0
//   then 2 words a slot: the squared norms of its share of the host's gradients, at that slot; else
//   0

#include <ATen/ops/zeros.h>

#include <cmath>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "dmuon/engine/stopwatch.h"

namespace dmuon::engine {
namespace {

constexpr std::int64_t kHashParts = 4;
constexpr std::int64_t kSettingsAt = 2 * kHashParts;
constexpr std::int64_t kFlagAt = kSettingsAt + 2;
constexpr std::int64_t kMatricesAt = kFlagAt + 1;

// NaN and infinity travel as the flag alone: what a maximum makes of a NaN is the backend's choice.
double finite_or_flag(double value, double* flag) {
  if (std::isfinite(value)) return value;
  *flag = 1;
  return 0;
}

}  // namespace

const Verdict& Engine::agree(const HostNorms& host, std::uint32_t settings) {
  take_turn();
  settle_step();
  if (verdict_) return *verdict_;
  Stopwatch watch(seconds_["agree_s"]);
  const auto num_matrices = static_cast<std::int64_t>(executor_.specs().size());
  const std::int64_t num_slots = options().num_replicates * options().num_shards;
  const std::int64_t norms_at = kMatricesAt + num_matrices;
  const std::int64_t slots_at = norms_at + num_matrices;
  at::Tensor tensor = at::zeros({slots_at + 2 * num_slots}, at::TensorOptions().dtype(at::kDouble));
  auto* words = tensor.mutable_data_ptr<double>();

  for (int part = 0; part < kHashParts; ++part) {
    words[part] = static_cast<double>((resolver_.hash() >> (16 * part)) & 0xffff);
    words[kHashParts + part] = -words[part];
  }
  words[kSettingsAt] = settings;
  words[kSettingsAt + 1] = -words[kSettingsAt];
  for (std::int64_t i = 0; i < num_matrices; ++i) {
    const auto matrix = static_cast<std::size_t>(i);
    const bool kept = placeholders_.empty() || placeholders_[matrix].grad().defined();
    words[kMatricesAt + i] = executor_.has_gradient(static_cast<int>(i)) && kept ? 1 : 0;
  }
  for (const OwnedBatch& batch : executor_.batches()) {
    const std::vector<double> squared = batch.squared_norms();
    for (std::size_t i = 0; i < squared.size(); ++i) {
      words[norms_at + batch.matrices[i]] = finite_or_flag(squared[i], &words[kFlagAt]);
    }
  }
  words[slots_at + 2 * options().slot()] = finite_or_flag(host.sharded, &words[kFlagAt]);
  words[slots_at + 2 * options().slot() + 1] = finite_or_flag(host.replicated, &words[kFlagAt]);

  groups().verdict.all_reduce_max(tensor, "the agreement of a step");

  for (int part = 0; part < kHashParts; ++part) {
    if (words[part] == -words[kHashParts + part]) continue;
    throw core::InvalidArgument(
        "dmuon: ranks have issued different operations in this step: some rank used modules in "
        "another order "
        "or more often than the others. Expected: all ranks run the same modules in the same order "
        "(a rank may "
        "skip some).");
  }
  core::require(words[kSettingsAt] == -words[kSettingsAt + 1],
                "dmuon: the hyperparameters of this step (opt.param_groups, or max_norm) differ "
                "between ranks, so owners would update by different rules. Expected: the same on "
                "every rank.");
  Verdict verdict;
  verdict.finite = words[kFlagAt] == 0;
  for (std::int64_t i = 0; i < num_matrices; ++i) {
    verdict.has_gradient.push_back(words[kMatricesAt + i] > 0);
    verdict.squared_norms.push_back(words[norms_at + i]);
  }
  for (std::int64_t shard = 0; shard < num_slots / options().host_replicates; ++shard) {
    verdict.host_squared_norm += words[slots_at + 2 * shard];
  }
  verdict.host_squared_norm += words[slots_at + 1];
  verdict_ = std::move(verdict);
  return *verdict_;
}

void Engine::scale_verdict(double factor) {
  if (!verdict_) return;
  for (double& squared : verdict_->squared_norms) squared *= factor * factor;
  verdict_->host_squared_norm *= factor * factor;
}

}  // namespace dmuon::engine
