#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/layout/packing.h"
#include "dmuon/wire/buffer.h"

namespace dmuon::wire {

// Names of what every owner holds of a parameter; an optimizer adds its own.
inline const std::string kMaster = "master";      ///< the weight
inline const std::string kGradient = "gradient";  ///< the mean, accumulated over micro-steps

/// Parameters of one owner whose matrices have one shape: named tensors in which their matrices
/// follow each other, contiguous, so that whole-batch operations are one kernel each.
struct OwnedBatch {
  std::vector<core::ParameterIndex> parameters;
  layout::View view;                          ///< of the first; others differ in their number alone
  std::vector<std::int64_t> first_matrix;     ///< [parameters + 1] of each; last, their number
  std::map<std::string, at::Tensor> tensors;  ///< [matrices, rows, cols] fp32

  /// [matrices, rows, cols] of the parameters at places [begin, end).
  at::Tensor part(const std::string& name, std::size_t begin, std::size_t end) const;
};

/// Some elements of a parameter's gradient.
struct GradientPiece {
  core::ParameterIndex parameter;
  at::Tensor values;  ///< flat
};

/// target = scale * values, or, where it adds, target + scale * values.
/// @param target  fp32
/// @param values  of its sizes, any floating dtype.
void add_scaled(at::Tensor target, const at::Tensor& values, double scale, bool adds);

/// All that this rank owns of a model. Not thread-safe, except that lanes may accumulate into
/// different parameters.
class Owned {
 public:
  /// @param all      parameters of the model; outlives this.
  /// @param batches  this rank's. Masters and gradients are uninitialised.
  /// @param pool     counts the bytes.
  Owned(const layout::Parameters& all,
        const std::vector<std::vector<core::ParameterIndex>>& batches,
        std::shared_ptr<BufferPool> pool);

  const core::Vector<core::BatchIndex, OwnedBatch>& batches() const { return batches_; }
  bool owns(core::ParameterIndex parameter) const { return positions_.at(parameter).index >= 0; }
  const std::shared_ptr<BufferPool>& pool() const { return pool_; }

  /// Adds a named tensor of zeros to every batch; the same names on all ranks.
  /// @throws InvalidArgument where there is one of this name.
  void add(const std::string& name);

  /// Ends it.
  /// @throws InvalidArgument as require_name.
  void remove(const std::string& name);

  /// @throws InvalidArgument that lists the known names, on ranks that own nothing too.
  void require_name(const std::string& name) const;

  /// What a named tensor holds of a parameter, in sizes of its view; undefined where another rank
  /// owns it.
  /// @throws InvalidArgument as require_name.
  at::Tensor of(core::ParameterIndex parameter, const std::string& name) const;

  /// What accumulate() multiplies by besides; 1 at first.
  void set_gradient_scale(double scale) { gradient_scale_ = scale; }

  /// gradient (+)= scale * gradient scale * values, from element `begin` on; overwrites where
  /// nothing is held. Who has done so for all elements says so by set_filled. The parameter must be
  /// owned here.
  /// @param values  [elements], any floating dtype.
  void accumulate(core::ParameterIndex parameter, std::int64_t begin, const at::Tensor& values,
                  double scale);

  /// Whether the gradient holds anything; where not, it is undefined. False at other ranks.
  bool filled(core::ParameterIndex parameter) const { return positions_.at(parameter).filled; }
  void set_filled(core::ParameterIndex parameter, bool filled) {
    positions_.at(parameter).filled = filled && owns(parameter);
  }

  /// What the gradients of all batches would be, in pieces that are small enough to be converted.
  std::vector<GradientPiece> gradient_pieces() const;
  /// [these] fp64: the 2-norm of each, on the device. Meaningless where nothing is held.
  at::Tensor norms() const;

 private:
  struct Position {
    core::BatchIndex batch;
    std::int64_t index = -1;  // in the batch; -1 where another rank owns it
    bool filled = false;
  };
  at::Tensor stack(const Position& position, const std::string& name) const;

  const layout::Parameters& all_;
  core::Vector<core::BatchIndex, OwnedBatch> batches_;
  core::Vector<core::ParameterIndex, Position> positions_;
  std::vector<std::string> names_;
  std::shared_ptr<BufferPool> pool_;
  double gradient_scale_ = 1;
};

}  // namespace dmuon::wire
