#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/engine/group.h"

namespace dmuon::engine {

/// The squared norms of this rank's share of the gradients that are not routed here.
struct HostNorms {
  double sharded = 0;     ///< of shards: each shard index counts once
  double replicated = 0;  ///< of tensors that every rank holds alike: counts once
};

/// What one rank brings to the agreement of a step.
struct AgreementInput {
  std::uint64_t issued = 0;    ///< the hash of all operations that this rank has issued
  std::uint32_t settings = 0;  ///< the digest of what must be equal, hyperparameters say
  /// Whether this rank had a gradient of the parameter since it was cleared.
  core::Vector<core::ParameterIndex, bool> has_gradient;
  /// Of the mean gradients that this rank owns, in fp64; 0 for all others.
  core::Vector<core::ParameterIndex, double> squared_norms;
  HostNorms host;
  int num_host_shards = 1;  ///< slots below this hold different shards of the host's gradients
};

/// What all ranks agree on before gradients are used; equal on all ranks.
struct Verdict {
  bool finite = true;  ///< no gradient of any rank holds NaN or infinity
  core::Vector<core::ParameterIndex, bool> has_gradient;     ///< on any rank, since it was cleared
  core::Vector<core::ParameterIndex, double> squared_norms;  ///< of the mean gradient, fp64
  double host_squared_norm = 0;  ///< of the gradients that stay with the host framework, all ranks

  /// All gradients, the host's too, have been multiplied by `factor`.
  void scale(double factor);
};

/// One message over all members of `group`, whose ranks are slots. Blocks.
/// @throws InvalidArgument, on all ranks, where what was issued or the settings differ.
Verdict agree(Group& group, const AgreementInput& input);

}  // namespace dmuon::engine
