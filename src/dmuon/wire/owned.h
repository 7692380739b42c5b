#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/layout/packing.h"
#include "dmuon/wire/buffer.h"

namespace dmuon::wire {

// Tensors that every owner holds of a parameter. An optimizer adds its own.
inline const std::string kMaster = "master";      ///< the weight
inline const std::string kGradient = "gradient";  ///< the mean, accumulated over micro-steps

/// Returns the sizes of a named tensor for one matrix of a view.
using MatrixSizes = std::function<std::vector<std::int64_t>(const layout::View& view)>;

/// Parameters of one owner whose matrices have one shape. Each named tensor holds their matrices
/// one after the other, contiguous, so that an operation on the whole batch is one kernel.
/// Gradients may lack Owned::gradient_factor.
struct OwnedBatch {
  std::vector<core::ParameterIndex> parameters;
  layout::View view;                       ///< the first one's; others differ in num_matrices only
  std::vector<std::int64_t> first_matrix;  ///< [parameters + 1] of each; last: number of matrices
  std::map<std::string, at::Tensor> tensors;  ///< [matrices, sizes of the name ...] fp32

  /// Returns [matrices, sizes of the name ...] of the parameters at places [begin, end).
  at::Tensor part(const std::string& name, std::size_t begin, std::size_t end) const;
};

/// Some elements of a parameter's gradient.
struct GradientPiece {
  core::ParameterIndex parameter;
  at::Tensor values;  ///< flat
};

/// Computes target = scale * values, or, if `adds`, target + scale * values.
/// @param target  fp32
/// @param values  same sizes, any floating dtype.
void add_scaled(at::Tensor target, const at::Tensor& values, double scale, bool adds);

/// All that this rank owns of a model.
///
///   Owned owned(parameters, batches, pool);
///   owned.add("momentum_buffer");
///   at::Tensor master = owned.of(parameter, kMaster);
///
/// Not thread-safe. But lanes may call master(), and accumulate() for different parameters, while
/// another thread adds or removes a named tensor.
class Owned {
 public:
  /// Allocates masters and gradients, uninitialised.
  /// @param all      parameters of the model; outlives this.
  /// @param batches  this rank's.
  /// @param pool     counts the bytes.
  Owned(const layout::Parameters& all,
        const std::vector<std::vector<core::ParameterIndex>>& batches,
        std::shared_ptr<BufferPool> pool);

  const core::Vector<core::BatchIndex, OwnedBatch>& batches() const { return batches_; }
  int num_parameters() const { return all_.size(); }  ///< of the model
  bool owns(core::ParameterIndex parameter) const { return positions_.at(parameter).index >= 0; }
  const std::shared_ptr<BufferPool>& pool() const { return pool_; }

  /// Adds a named tensor of zeros to every batch. All ranks add the same names.
  /// @param sizes  of one matrix; default: the matrix's own.
  /// @throws InvalidArgument if the name exists. Then, or if memory does not suffice, nothing has
  /// changed.
  void add(const std::string& name, MatrixSizes sizes = {});

  /// Removes a named tensor.
  /// @throws InvalidArgument as require_name.
  void remove(const std::string& name);

  /// Exchanges the values of two named tensors of equal sizes. Takes memory for a piece of one.
  /// @throws InvalidArgument as require_name. Then, or if memory does not suffice, nothing has
  /// changed.
  void exchange(const std::string& first, const std::string& second);

  bool has_name(const std::string& name) const;
  /// @throws InvalidArgument that lists the known names, also on ranks that own nothing.
  void require_name(const std::string& name) const { named(name); }

  /// Returns a parameter's named tensor, a view of the batch's: [sizes ...] of a single matrix,
  /// else [num_matrices, sizes ...]. Undefined if another rank owns the parameter. Gradients take
  /// the factor that waits before.
  /// @throws InvalidArgument as require_name.
  at::Tensor of(core::ParameterIndex parameter, const std::string& name);
  /// Returns of(parameter, kMaster).
  const at::Tensor& master(core::ParameterIndex parameter) const {
    return positions_.at(parameter).master;
  }

  /// A parameter's elements in its leaf's named tensor.
  struct Part {
    core::ParameterIndex parameter;
    layout::Segment elements;
  };
  /// Returns all parameters of a leaf in order, also those of other owners.
  /// @throws InvalidArgument as require_name.
  std::vector<Part> parts_of(const layout::Leaf& leaf, const std::string& name) const;

  /// Returns the sizes of a leaf's whole named tensor: the leaf's own sizes if it has as many
  /// elements, else as of() has them for all of the leaf's matrices. Flat if their shapes differ.
  std::vector<std::int64_t> sizes_of(const layout::Leaf& leaf, const std::string& name) const;
  /// Returns the number of equal rows that a leaf's whole named tensor is cut into shards by. It is
  /// the leaf's first dimension, so that shards belong to the leaf's shards. A tensor that these
  /// rows do not divide, or that is one row as sizes_of() has it, is cut along its own first
  /// dimension.
  std::int64_t rows_of(const layout::Leaf& leaf, const std::string& name) const;
  std::int64_t num_elements(const layout::Leaf& leaf, const std::string& name) const {
    return parts_of(leaf, name).back().elements.end;
  }

  /// Sets a factor of accumulate(); 1 at first.
  void set_gradient_scale(double scale) { gradient_scale_ = scale; }

  /// Computes gradient (+)= scale * gradient scale * values, from element `begin` on. Overwrites if
  /// the gradient holds nothing. Call set_filled after all elements. The parameter must be owned
  /// here, and no factor may wait.
  /// @param values  [elements], any floating dtype.
  void accumulate(core::ParameterIndex parameter, std::int64_t begin, const at::Tensor& values,
                  double scale);

  /// True if the gradient holds values; else it is undefined. False at other ranks.
  bool filled(core::ParameterIndex parameter) const { return positions_.at(parameter).filled; }
  void set_filled(core::ParameterIndex parameter, bool filled) {
    positions_.at(parameter).filled = filled && owns(parameter);
  }

  /// Multiplies all gradients. No pass over memory: the factor waits for the update, which has one.
  /// No accumulate() may be in flight.
  /// @param factor  [] on the device; nobody changes it later.
  void scale_gradients(const at::Tensor& factor);
  /// Multiplies the factor that waits into the gradients that hold values. So do all calls that
  /// return gradients. No accumulate() may be in flight.
  void multiply_factor_in();
  /// Returns the factor that waits, [] fp32: values of gradients lack it. Undefined: none does.
  const at::Tensor& gradient_factor() const { return gradient_factor_; }

  /// Returns the gradients of all batches, filled or not, in pieces that are small enough to be
  /// converted.
  std::vector<GradientPiece> gradient_pieces();
  /// Returns the 2-norm of each piece, [pieces] fp64 on the device. Norms of gradients that hold
  /// nothing are meaningless.
  at::Tensor norms();

 private:
  struct Named {
    std::string name;
    MatrixSizes sizes;
  };
  struct Position {
    core::BatchIndex batch;
    std::int64_t index = -1;  // in the batch; -1 if another rank owns the parameter
    bool filled = false;
    at::Tensor master{};    // undefined if another rank owns the parameter
    at::Tensor gradient{};  // flat
  };
  const Named& named(const std::string& name) const;
  std::vector<std::int64_t> sizes_of(core::ParameterIndex parameter, const std::string& name) const;
  at::Tensor stack(const Position& position, const std::string& name) const;
  at::Tensor view_of(core::ParameterIndex parameter, const std::string& name) const;

  const layout::Parameters& all_;
  core::Vector<core::BatchIndex, OwnedBatch> batches_;
  core::Vector<core::ParameterIndex, Position> positions_;
  std::vector<Named> named_;
  std::shared_ptr<BufferPool> pool_;
  double gradient_scale_ = 1;
  at::Tensor gradient_factor_;
};

}  // namespace dmuon::wire
