#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/wire/owned.h"
#include "dmuon/wire/slice_exchange.h"

namespace dmuon::engine {

/// The step's gradients as all ranks know them before they are used. Equal on all ranks. Tensors
/// are on the engine's device; the host has not waited for them unless that is a CPU.
struct Verdict {
  core::Vector<core::ParameterIndex, bool> has_gradient;  ///< on any rank, since it was cleared
  /// [T parameters + 2 ranks] fp64: the squared norms of each parameter's mean gradient, one for
  /// each rank of the tensor-parallel group, then of each rank's part of the host framework's
  /// gradients. They add up to the whole gradient's. With tensor parallelism [ranks] follow, which
  /// are no part of it: what each has of the host's gradients that all ranks of its slot have. The
  /// next verdict reuses the memory.
  at::Tensor squared_norms;
  int tensor_parallel = 1;  ///< T
  /// [GradientNorms::num_maxima] fp64: the largest of the ranks' numbers. The next verdict reuses
  /// the memory.
  at::Tensor maxima = {};
  /// True if some rank has gradients that are no means over all ranks yet, see OtherGradients.
  bool has_open_gradients = false;

  at::Tensor norm() const;   ///< [] fp64, of all gradients together
  at::Tensor norms() const;  ///< [parameters] fp64
  /// [parameters, T] fp64, of the parts that the ranks of a slot have.
  at::Tensor squared_norms_of_ranks() const;
  /// [T, slots] fp64, of what ranks have of the host's gradients that all ranks of a slot have; T
  /// > 1.
  at::Tensor squared_norms_of_copies() const;
  at::Tensor finite() const;  ///< [] bool: no gradient of any rank holds NaN or infinity

  /// All gradients, the host's too, have been multiplied by `factor`, [].
  void scale(const at::Tensor& factor);

 private:
  std::int64_t num_counted() const;
};

/// Computes the words of Verdict::squared_norms that this rank knows. None is below 0, and only one
/// rank has a word that is not 0 (a parameter's owner), so that the maximum over all ranks is that
/// rank's word. If all ranks of a tensor-parallel group have a parameter, the word of each is a
/// T-th. Maxima of other numbers travel behind them. Not thread-safe.
///
///     at::Tensor words = norms.measure(host);        // this rank's
///     executor.max_over_mesh(words, "the norms");    // all ranks'
///     norms.keep_only(has_gradient);
class GradientNorms {
 public:
  /// @param owned   outlives this.
  /// @param sliced  of all parameters; empty without tensor parallelism.
  /// @param slot, tensor_rank  this rank's place in the mesh.
  /// @param num_host_shards    the first slots hold different shards of the host's gradients.
  GradientNorms(wire::Owned& owned, const wire::SlicedParameters& sliced, const layout::Mesh& mesh,
                core::Slot slot, int tensor_rank, int num_host_shards);

  /// @param host  [2] fp64: the squared norms of this rank's shards of the host's gradients, and of
  ///              the gradients that every rank holds whole. Undefined: zeros. With tensor
  ///              parallelism [3]: also of what this rank has of gradients that all ranks of its
  ///              slot have. They count at the slot's first rank alone.
  /// @param maxima  [num_maxima] on the engine's device. Undefined: -infinity.
  /// @returns     Verdict::squared_norms of this rank, then its maxima, until the next call. A NaN
  ///              is infinity there, because a backend chooses the maximum of a NaN.
  const at::Tensor& measure(const at::Tensor& host, const at::Tensor& maxima = {});

  /// Sets how many maxima travel along; 0 at first. All ranks do the same, between steps.
  void set_num_maxima(int num_maxima);
  int num_maxima() const { return num_maxima_; }

  /// Sets the norms of parameters without a gradient to 0. Comes after the maximum over all ranks.
  void keep_only(const core::Vector<core::ParameterIndex, bool>& has_gradient);

 private:
  // The words of some parameters become 0. A device gets the set where it changes.
  class Eraser {
   public:
    void erase(const at::Tensor& words, std::vector<bool> which);

   private:
    std::vector<bool> which_;
    at::Tensor indices_;
  };

  int word_of(core::ParameterIndex parameter, int tensor_rank) const {
    return parameter.value() * tensor_parallel_ + tensor_rank;
  }

  wire::Owned& owned_;
  int tensor_parallel_;
  int tensor_rank_;
  int num_parameters_;
  int num_maxima_ = 0;
  int host_words_;           // the first of this rank's
  int copies_word_;          // with tensor parallelism: this rank's
  at::Tensor word_of_;       // [owned.gradient_pieces()] of each
  at::Tensor parts_;         // [owned.gradient_pieces()] of each that counts here; or undefined: 1
  at::Tensor host_weights_;  // [2] 1 where this rank's word counts
  at::Tensor words_;
  Eraser without_here_, without_anywhere_;
};

}  // namespace dmuon::engine
