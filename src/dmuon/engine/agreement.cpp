// The agreement of a step: one message over all ranks, an elementwise maximum of fp64 words,
// because every word is either a flag or is known to one rank alone:
//
//   [0, 4)        the hash of what was issued, in 16-bit parts: the largest of each
//   [4, 8)        the same negated: minus the smallest of each
//   [8, 10)       the digest of the settings: the largest, and minus the smallest
//   [10]          1 if this rank holds a gradient that is not finite
//   [11, 11+n)    1 if this rank had a gradient of the parameter
//   [11+n, 11+2n) the squared norm of the parameter's mean gradient, at its owner; else 0
//   then 2 words a slot: the squared norms of its share of the host's gradients, at that slot; else
//   0

#include "dmuon/engine/agreement.h"

#include <ATen/ops/zeros.h>

#include <cmath>

#include "dmuon/core/error.h"

namespace dmuon::engine {
namespace {

constexpr int kHashParts = 4;
constexpr int kSettingsAt = 2 * kHashParts;
constexpr int kFlagAt = kSettingsAt + 2;
constexpr int kParametersAt = kFlagAt + 1;

// NaN and infinity travel as the flag alone: what a maximum makes of a NaN is the backend's choice.
double finite_or_flag(double value, double* flag) {
  if (std::isfinite(value)) return value;
  *flag = 1;
  return 0;
}

void require_equal_everywhere(const double* words) {
  for (int part = 0; part < kHashParts; ++part) {
    core::require(
        words[part] == -words[kHashParts + part],
        "dmuon: ranks have issued different operations in this step: some rank used modules in "
        "another order or more often than the others. Expected: all ranks run the same modules in "
        "the same order (a rank may skip some).");
  }
  core::require(words[kSettingsAt] == -words[kSettingsAt + 1],
                "dmuon: the hyperparameters of this step (opt.param_groups, or max_norm) differ "
                "between ranks, so owners would update by different rules. Expected: the same on "
                "every rank.");
}

}  // namespace

Verdict agree(Group& group, const AgreementInput& input) {
  const int num_parameters = input.has_gradient.size();
  const int norms_at = kParametersAt + num_parameters;
  const int slots_at = norms_at + num_parameters;
  at::Tensor tensor =
      at::zeros({slots_at + 2 * group.size()}, at::TensorOptions().dtype(at::kDouble));
  auto* words = tensor.mutable_data_ptr<double>();

  for (int part = 0; part < kHashParts; ++part) {
    words[part] = static_cast<double>((input.issued >> (16 * part)) & 0xffff);
    words[kHashParts + part] = -words[part];
  }
  words[kSettingsAt] = input.settings;
  words[kSettingsAt + 1] = -words[kSettingsAt];
  for (const core::ParameterIndex parameter : input.has_gradient.indices()) {
    words[kParametersAt + parameter.value()] = input.has_gradient[parameter] ? 1 : 0;
    words[norms_at + parameter.value()] =
        finite_or_flag(input.squared_norms[parameter], &words[kFlagAt]);
  }
  double* own = words + slots_at + 2 * group.rank();
  own[0] = finite_or_flag(input.host.sharded, &words[kFlagAt]);
  own[1] = finite_or_flag(input.host.replicated, &words[kFlagAt]);

  group.all_reduce_max(tensor, "the agreement of a step");

  require_equal_everywhere(words);
  Verdict verdict;
  verdict.finite = words[kFlagAt] == 0;
  for (int i = 0; i < num_parameters; ++i) {
    verdict.has_gradient.push_back(words[kParametersAt + i] > 0);
    verdict.squared_norms.push_back(words[norms_at + i]);
  }
  for (int shard = 0; shard < input.num_host_shards; ++shard) {
    verdict.host_squared_norm += words[slots_at + 2 * shard];
  }
  verdict.host_squared_norm += words[slots_at + 1];
  return verdict;
}

void Verdict::scale(double factor) {
  for (double& squared : squared_norms) squared *= factor * factor;
  host_squared_norm *= factor * factor;
}

}  // namespace dmuon::engine
