#pragma once

#include <ATen/core/Tensor.h>

#include "dmuon/core/index.h"
#include "dmuon/layout/packing.h"
#include "dmuon/wire/owned.h"

namespace dmuon::engine {

/// What all ranks know of a step's gradients before they are used: equal on all ranks. Tensors are
/// on the engine's device: on one that is no CPU nobody has waited for them.
struct Verdict {
  core::Vector<core::ParameterIndex, bool> has_gradient;  ///< on any rank, since it was cleared
  /// [parameters + 2 slots] fp64: of each parameter's mean gradient, then of what each rank has of
  /// the host framework's. Their sum is the whole gradient's. In memory of the next verdict too.
  at::Tensor squared_norms;

  at::Tensor norm() const;    ///< [] fp64, of all gradients together
  at::Tensor norms() const;   ///< [parameters] fp64
  at::Tensor finite() const;  ///< [] bool: no gradient of any rank holds NaN or infinity

  /// All gradients, the host's too, have been multiplied by `factor`, [].
  void scale(const at::Tensor& factor);
};

/// Finds the words of Verdict::squared_norms that this rank knows. Every word is 0 but at one rank
/// (a parameter's at its owner), so that a sum over all ranks is the same in any order.
class GradientNorms {
 public:
  /// @param owned      outlives this.
  /// @param num_slots  ranks; the first `num_host_shards` hold different shards of the host's
  ///                   gradients.
  GradientNorms(const layout::Parameters& parameters, const wire::Owned& owned, core::Slot slot,
                int num_slots, int num_host_shards);

  /// @param host  [2] fp64: the squared norms of what this rank has of the host's gradients, of
  ///              shards and of those that every rank holds alike; undefined: zeros.
  /// @returns     [parameters + 2 slots], until the next call.
  const at::Tensor& measure(const at::Tensor& host);

  /// Once all ranks know all: 0 where there is no gradient.
  void keep_only(const core::Vector<core::ParameterIndex, bool>& has_gradient);

 private:
  // The words of some parameters become 0. A device gets the set where it changes.
  class Eraser {
   public:
    void erase(const at::Tensor& words, core::Vector<core::ParameterIndex, bool> which);

   private:
    core::Vector<core::ParameterIndex, bool> which_;
    at::Tensor indices_;
  };

  const wire::Owned& owned_;
  core::Slot slot_;
  int num_parameters_;
  at::Tensor parameter_of_;  // [owned.gradient_pieces()] of each
  at::Tensor host_weights_;  // [2] 1 where this rank's word counts
  at::Tensor words_;
  Eraser without_here_, without_anywhere_;
};

}  // namespace dmuon::engine
