#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dmuon/core/error.h"
#include "dmuon/core/index.h"
#include "dmuon/wire/host_words.h"

namespace dmuon::engine {

/// The contribution of one rank's host to the agreement of a step.
struct AgreementInput {
  std::uint64_t issued = 0;    ///< the hash of all operations that this rank has issued
  std::uint32_t settings = 0;  ///< the digest of what must be equal, hyperparameters say
  int model = 1;               ///< the number of the model that the step is of
  /// The number of parameters of the largest model on the mesh. Messages of all models are as long
  /// as its: gloo ends the process of a rank that gets a longer message than its own.
  int most_parameters = 0;
  std::int64_t most_words = 0;  ///< that travel along with any model's message
  /// True if this rank has gradients that are no means over all ranks yet, see OtherGradients.
  bool has_open_gradients = false;
  /// True if this rank had a gradient of the parameter since it was cleared.
  core::Vector<core::ParameterIndex, bool> has_gradient;
  /// True if the gradient that this rank had was cleared behind the last backward.
  core::Vector<core::ParameterIndex, bool> has_cleared;
  /// [any] fp64 of the host's memory, without a NaN; may be undefined. They travel along: every
  /// rank ends with the largest of each.
  at::Tensor words;
};

/// What is true of any rank. Equal on all ranks.
struct Agreed {
  bool has_open_gradients = false;
  core::Vector<core::ParameterIndex, bool> has_gradient;
  core::Vector<core::ParameterIndex, bool> has_cleared;
};

/// The settings of a step differ between ranks. All ranks throw it in the same place, so they can
/// exchange more about the settings.
struct SettingsDiffer : core::InvalidArgument {
  using InvalidArgument::InvalidArgument;
};

/// One exchange of words between all ranks of the mesh. Blocks.
/// @throws InvalidArgument, on all ranks, where models or what was issued differ; SettingsDiffer,
/// where only settings do.
Agreed agree(wire::HostWords& all, const AgreementInput& input);

}  // namespace dmuon::engine
