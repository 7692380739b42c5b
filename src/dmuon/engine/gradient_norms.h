#pragma once

#include <ATen/core/Tensor.h>

#include "dmuon/core/index.h"
#include "dmuon/layout/packing.h"
#include "dmuon/wire/owned.h"

namespace dmuon::engine {

/// The step's gradients as all ranks know them before they are used. Equal on all ranks. Tensors
/// are on the engine's device; the host has not waited for them unless that is a CPU.
struct Verdict {
  core::Vector<core::ParameterIndex, bool> has_gradient;  ///< on any rank, since it was cleared
  /// [parameters + 2 slots] fp64: the squared norm of each parameter's mean gradient, then of each
  /// rank's part of the host framework's gradients. They add up to the whole gradient's. The next
  /// verdict reuses the memory.
  at::Tensor squared_norms;

  at::Tensor norm() const;    ///< [] fp64, of all gradients together
  at::Tensor norms() const;   ///< [parameters] fp64
  at::Tensor finite() const;  ///< [] bool: no gradient of any rank holds NaN or infinity

  /// All gradients, the host's too, have been multiplied by `factor`, [].
  void scale(const at::Tensor& factor);
};

/// Computes the words of Verdict::squared_norms that this rank knows. Only one rank has a word that
/// is not 0 (a parameter's owner), so that a sum over all ranks is the same in any order. Not
/// thread-safe.
///
///     at::Tensor words = norms.measure(host);          // this rank's
///     executor.sum_over_mesh(words, "sum of norms");   // all ranks'
///     norms.keep_only(has_gradient);
class GradientNorms {
 public:
  /// @param owned      outlives this.
  /// @param num_slots  ranks; the first `num_host_shards` hold different shards of the host's
  ///                   gradients.
  GradientNorms(const layout::Parameters& parameters, const wire::Owned& owned, core::Slot slot,
                int num_slots, int num_host_shards);

  /// @param host  [2] fp64: the squared norms of this rank's shards of the host's gradients, and of
  ///              the gradients that every rank holds whole. Undefined: zeros.
  /// @returns     [parameters + 2 slots], until the next call.
  const at::Tensor& measure(const at::Tensor& host);

  /// Sets the norms of parameters without a gradient to 0. Comes after the sum over all ranks.
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
