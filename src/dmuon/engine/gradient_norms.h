#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/wire/owned.h"
#include "dmuon/wire/slice_exchange.h"

namespace dmuon::engine {

/// The places of the words of a step's norms, alike on all ranks. First come [parameters, T] words
/// of parameters, T being the ranks of the tensor-parallel group, then [T, slots, 2] of each rank's
/// part of the host framework's gradients. With tensor parallelism [T, slots] follow, of what each
/// rank has of the host's gradients that all ranks of its slot have. The maxima are last.
struct NormWords {
  int num_parameters = 0;
  int tensor_parallel = 1;  ///< T
  int num_slots = 1;
  int num_maxima = 0;

  int of(core::ParameterIndex parameter, int tensor_rank) const {
    return parameter.value() * tensor_parallel + tensor_rank;
  }
  int host() const { return num_parameters * tensor_parallel; }
  int of_host(int tensor_rank, core::Slot slot) const {
    return host() + 2 * (tensor_rank * num_slots + slot.value());
  }
  /// The words before add up to the whole gradient's.
  int copies() const { return host() + 2 * tensor_parallel * num_slots; }
  int of_copies(int tensor_rank, core::Slot slot) const {
    return copies() + tensor_rank * num_slots + slot.value();
  }
  int maxima() const { return copies() + (tensor_parallel > 1 ? tensor_parallel * num_slots : 0); }
  int size() const { return maxima() + num_maxima; }
};

/// The step's gradients as all ranks know them before they are used. Equal on all ranks. Tensors
/// are on the engine's device; the host has not waited for them unless that is a CPU.
struct Verdict {
  core::Vector<core::ParameterIndex, bool> has_gradient;  ///< on any rank, since it was cleared
  /// [NormWords::maxima] fp64: squared norms of mean gradients. The next verdict reuses the memory.
  at::Tensor squared_norms;
  /// [NormWords::num_maxima] fp64: the largest of the ranks' numbers. The next verdict reuses the
  /// memory.
  at::Tensor maxima = {};
  NormWords words = {};
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
};

/// Computes the NormWords that this rank knows. None is below 0, and only one
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
  /// @returns     [NormWords::size] fp64 of this rank, until the next call. A NaN is infinity in
  ///              them, because a backend chooses the maximum of a NaN.
  const at::Tensor& measure(const at::Tensor& host, const at::Tensor& maxima = {});

  /// Sets how many maxima travel along; 0 at first. All ranks do the same, between steps.
  void set_num_maxima(int num_maxima);
  const NormWords& at() const { return at_; }

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

  wire::Owned& owned_;
  NormWords at_;
  core::Slot slot_;
  int tensor_rank_;
  at::Tensor word_of_;       // [owned.gradient_pieces()] of each
  at::Tensor parts_;         // [owned.gradient_pieces()] of each that counts here; or undefined: 1
  at::Tensor host_weights_;  // [2] 1 where this rank's word counts
  at::Tensor words_;
  Eraser without_here_, without_anywhere_;
};

}  // namespace dmuon::engine
