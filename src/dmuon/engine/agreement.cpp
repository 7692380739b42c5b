// The agreement of a step: one message over all ranks, an elementwise maximum of fp64 words. A word
// is a flag, or is known to one rank alone, or its largest value is wanted:
//
//   [0, 4)      the hash of what was issued, in 16-bit parts: the largest of each
//   [4, 8)      the same negated: minus the smallest of each
//   [8, 10)     the digest of the settings: the largest, and minus the smallest
//   [10, 12)    the number of the model, likewise
//   [12]        1 if this rank has open gradients
//   [13, 13+n)  1 if this rank had a gradient of the parameter
//   n more      1 if it was cleared behind the last backward
//   then the words that travel along, and unused ones

#include "dmuon/engine/agreement.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "dmuon/core/error.h"

namespace dmuon::engine {
namespace {

constexpr int kHashParts = 4;
constexpr int kSettingsAt = 2 * kHashParts;
constexpr int kModelAt = kSettingsAt + 2;
constexpr int kOpenAt = kModelAt + 2;
constexpr int kParametersAt = kOpenAt + 1;

void require_equal_everywhere(const double* words) {
  core::require(words[kModelAt] == -words[kModelAt + 1],
                "dmuon: ranks clip or step different models of one mesh: one rank model ",
                -words[kModelAt + 1], ", another model ", words[kModelAt],
                ", counted in the order in which they got their Muon. Expected: all ranks use the "
                "models of a mesh in the same order.");
  for (int part = 0; part < kHashParts; ++part) {
    core::require(
        words[part] == -words[kHashParts + part],
        "dmuon: ranks have issued different operations in this step: some rank used modules, or "
        "the models of a mesh, in another order or more often than the others. Expected: all ranks "
        "run the same models and modules in the same order (a rank may skip some modules).");
  }
  if (words[kSettingsAt] != -words[kSettingsAt + 1])
    throw SettingsDiffer("dmuon: the settings of this step differ between ranks");
}

}  // namespace

Agreed agree(wire::HostWords& all, const AgreementInput& input) {
  const int num_parameters = input.has_gradient.size();
  const int cleared_at = kParametersAt + num_parameters;
  const int along_at = cleared_at + num_parameters;
  const std::int64_t num_along = input.words.defined() ? input.words.numel() : 0;
  // A parameter has two flags.
  std::int64_t num_unused = std::int64_t{2} * std::max(input.most_parameters - num_parameters, 0);
  if (num_along > 0) num_unused += std::max<std::int64_t>(input.most_words - num_along, 0);
  const at::Tensor message =
      at::zeros({along_at + num_along + num_unused}, at::TensorOptions().dtype(at::kDouble));
  auto* words = message.mutable_data_ptr<double>();
  for (int part = 0; part < kHashParts; ++part) {
    words[part] = static_cast<double>((input.issued >> (16 * part)) & 0xffff);
    words[kHashParts + part] = -words[part];
  }
  words[kSettingsAt] = input.settings;
  words[kSettingsAt + 1] = -words[kSettingsAt];
  words[kModelAt] = input.model;
  words[kModelAt + 1] = -words[kModelAt];
  words[kOpenAt] = input.has_open_gradients ? 1 : 0;
  for (const core::ParameterIndex parameter : input.has_gradient.indices()) {
    words[kParametersAt + parameter.value()] = input.has_gradient[parameter] ? 1 : 0;
    words[cleared_at + parameter.value()] = input.has_cleared.at(parameter) ? 1 : 0;
  }
  at::Tensor along = message.narrow(0, along_at, num_along);
  if (num_along > 0) along.copy_(input.words);

  all.all_reduce_max(message, watch::Rendezvous::kAgreement, "the agreement of a step");

  require_equal_everywhere(words);
  if (num_along > 0) at::Tensor(input.words).copy_(along);
  Agreed agreed{words[kOpenAt] > 0, {}, {}};
  for (int i = 0; i < num_parameters; ++i) {
    agreed.has_gradient.push_back(words[kParametersAt + i] > 0);
    agreed.has_cleared.push_back(words[cleared_at + i] > 0);
  }
  return agreed;
}

}  // namespace dmuon::engine
