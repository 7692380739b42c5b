#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/layout/parameter.h"
#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/products.h"

namespace dmuon::optim {

/// A tensor that owners keep beside weights and gradients, fp32, zeros at first.
struct State {
  std::string name;  ///< in wire::Owned and in checkpoints
  /// Returns the rows and columns of the state of one rows x cols matrix. `transposed` is as in
  /// Piece.
  std::function<std::array<std::int64_t, 2>(std::int64_t rows, std::int64_t cols, bool transposed)>
      sizes;

  /// Returns the sizes of the state of one stored matrix, [rows', cols']. If blocks of columns are
  /// orthogonalised apart, their states lie side by side as the blocks do. Interleaved
  /// rows have interleaved rows of a state.
  /// @throws InvalidArgument if rows are interleaved and the state has no row for each of them.
  std::vector<std::int64_t> sizes_of(const layout::View& view) const;
};

/// Equally shaped matrices that are updated together. Tensors are views of what the owner keeps.
struct Piece {
  at::Tensor weights;                   ///< fp32 [..., rows, cols]
  at::Tensor gradient = {};             ///< of weights' sizes, fp32; no rule changes it
  std::vector<at::Tensor> states = {};  ///< in the order of Rule::states, [..., rows', cols']
  at::Tensor applies = {};  ///< [] bool on the device: false leaves weights and states as is
  at::Tensor memo = {};     ///< newton_schulz::MomentumStep::memo
  bool transposed = false;  ///< True if weights are stored as [in, out]
  /// See newton_schulz::MomentumStep. Undefined unless Rule::takes_gradient_factor.
  at::Tensor gradient_factor = {};
  /// Rule::scalars on the device, in fp32; null: the kernels of this piece read none there.
  const float* scalars = nullptr;
};

/// The orthogonalised update of a piece. Its last product is not computed yet.
struct Orthogonalised {
  const newton_schulz::Products* products = nullptr;
  const newton_schulz::Elementwise* elementwise = nullptr;
  newton_schulz::PendingProduct pending;

  /// weights <- decay weights + factor update, in place. If the backend can, the last product goes
  /// straight into the weights: see Products::add_to_weights.
  void add_to_weights(const Piece& piece, const newton_schulz::Scalar& decay,
                      const newton_schulz::Scalar& factor) const;

  /// Computes the update, of the iteration's dtype.
  /// @param sizes  of the piece's weights.
  at::Tensor computed(at::IntArrayRef sizes) const;
};

/// A rule of update, with one group's hyperparameters. Newton-Schulz runs between its two halves
/// (BatchUpdate). Rules are immutable and thread-safe, work on the current stream with gradients
/// off, and wait for no accelerator.
class Rule {
 public:
  virtual ~Rule() = default;

  virtual const std::vector<State>& states() const = 0;

  /// Returns the numbers of this step that kernels read on the device, as Piece::scalars, for
  /// matrices of these sizes.
  virtual std::vector<double> scalars(std::int64_t /*rows*/, std::int64_t /*cols*/,
                                      bool /*transposed*/) const {
    return {};
  }

  /// Returns all that `prepare` and `apply` depend on beside the piece and `scalars`, as bytes.
  /// Nothing: a CUDA graph cannot hold them (BatchGraphs).
  virtual std::optional<std::string> constants() const { return std::nullopt; }

  /// True if `prepare` and `direction` multiply each gradient by Piece::gradient_factor. If a rule
  /// does not, muon_step multiplies gradients before, in a pass over memory.
  virtual bool takes_gradient_factor() const { return false; }

  /// Moves states by the gradient. With interleaved rows the piece has neither weights nor other
  /// states than the first.
  /// @param dtype, eps  of the iteration; see Elementwise::normalise.
  /// @return  the beginning of the iteration.
  virtual newton_schulz::Start prepare(const newton_schulz::Elementwise& elementwise,
                                       const Piece& piece, at::ScalarType dtype,
                                       double eps) const = 0;

  /// Moves the weights by the update. With interleaved rows the piece lacks the gradient and the
  /// first state. A rule that changes the update first calls `computed`; otherwise `add_to_weights`
  /// saves a pass over memory and a rounding.
  virtual void apply(const Piece& piece, const Orthogonalised& update) const = 0;

  // With tensor parallelism a piece has slices of matrices, element by element. A rule that needs
  // whole rows or columns of them does not override these functions, which throw InvalidArgument.

  /// Moves the states by the gradient.
  /// @return  the direction that is orthogonalised, fp32, of the weights' sizes.
  virtual at::Tensor direction(const Piece& slices) const;

  /// Moves the weights by slices of the orthogonalised update.
  /// @param update      of the weights' sizes.
  /// @param rows, cols  of a whole matrix.
  virtual void move(const Piece& slices, const at::Tensor& update, std::int64_t rows,
                    std::int64_t cols) const;
};

}  // namespace dmuon::optim
