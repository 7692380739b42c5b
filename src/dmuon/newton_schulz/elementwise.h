#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "dmuon/newton_schulz/scalar.h"

namespace dmuon::newton_schulz {

class Elementwise;

/// The beginning of an iteration: X = scale x. The first products include the scale, so scaling
/// takes no pass over x.
struct Start {
  at::Tensor x;
  double scale = 1;
  /// Another factor of each matrix, which only the device knows: fp32 [(b,) 1, 1]; undefined: 1.
  /// Where it is defined, entries of x are below 2^15.
  at::Tensor scales = {};
  const Elementwise* elementwise = nullptr;  ///< of the scales
  at::Tensor squares = {};                   ///< of the scales, contiguous; undefined: not known
};

/// How a momentum moves in one step. Tensors are fp32, of one matrix, [rows, cols], or of a batch,
/// [..., rows, cols], whose matrices may lie apart in memory.
struct MomentumStep {
  at::Tensor momentum;
  at::Tensor gradient;
  Scalar mu = 0;  ///< on the device lies 1 - mu
  bool nesterov = false;
  /// [] bool on the device. If it is false, the momentum keeps its values whatever the gradient
  /// holds.
  at::Tensor applies;
  /// [..., 1, Elementwise::memo_words()]; undefined if there are no words.
  at::Tensor memo = {};
  /// [] on the device; undefined: 1. Results have the bits of a gradient that was multiplied by it
  /// before, but the gradient itself does not change.
  at::Tensor gradient_factor = {};
};

/// weights <- decay weights + factor scale scales update, in place.
struct WeightStep {
  at::Tensor weights;  ///< fp32 [..., rows, cols]; its matrices may lie apart in memory
  Scalar decay = 1;
  at::Tensor update;  ///< of weights' sizes, finite if the step does not apply; any dtype, strides
  Scalar factor = 0;
  /// [] bool on the device. If it is false, weights keep their values; one of zero may change its
  /// sign.
  at::Tensor applies;
  at::Tensor scales = {};  ///< Start::scales of the same object, one a matrix; undefined: 1
  double scale = 1;
};

/// Operations element by element on one kind of device. An object is stateless and thread-safe,
/// works on the current stream, records no autograd, and never waits for an accelerator.
///
///     const Elementwise& elementwise = elementwise_of(weights.device());
///     const Start start =
///         elementwise.start({momentum, gradient, mu, nesterov, applies}, dtype, eps);
///     ...  // orthogonalise
///     elementwise.move_weights({weights, decay, update, -lr, applies, start.scales});
///
class Elementwise {
 public:
  virtual ~Elementwise() = default;

  /// The name of its file in elementwise/; Choice::elementwise.
  virtual std::string_view name() const = 0;

  /// The dtype of the iteration if the user names none.
  virtual at::ScalarType default_dtype() const = 0;

  /// Divides every matrix by the larger of its Frobenius norm and `eps`, then rounds to `dtype`.
  /// Entries may have any size that x's dtype holds (1e-30 .. 1e30 and beyond). A zero matrix stays
  /// zero. Entries that are not finite become NaN; products then fill the matrix with NaN.
  ///
  /// @param x  [b, rows, cols], any dtype of Products; rows and cols at least 1.
  /// @return   [b, rows', cols'] contiguous, new: rows' >= rows and cols' >= cols. The padding
  ///           suits the device's products and is zero; the iteration keeps it zero.
  virtual at::Tensor normalise(const at::Tensor& x, at::ScalarType dtype, double eps) const = 0;

  /// momentum <- momentum + (1 - mu) (gradient - momentum).
  /// @return  The direction: gradient + mu (momentum - gradient) with nesterov, in new memory; else
  ///          momentum itself. If the step does not apply, momentum's values.
  virtual at::Tensor move_momentum(const MomentumStep& step) const = 0;

  /// Words that `start` keeps of each matrix from step to step, in MomentumStep::memo: zeros at
  /// first, and after any change from outside. They decide how long it takes, never its result.
  virtual std::int64_t memo_words() const { return 0; }

  /// Moves the momentum and normalises its direction. May do both in one pass over memory.
  /// If a gradient has a NaN or an infinity, its matrix's momentum and start have it too.
  /// @return  x in new memory, of normalise's sizes: [rows', cols'], or [b, rows', cols'] with b
  ///          the number of matrices.
  virtual Start start(const MomentumStep& step, at::ScalarType dtype, double eps) const;

  /// The start of another direction, by `normalise`.
  /// @param direction  [rows, cols] or [..., rows, cols]
  Start start_of(const at::Tensor& direction, at::ScalarType dtype, double eps) const;

  /// x <- factors x, where x and factors are as Start's x and scales.
  virtual void multiply(const at::Tensor& x, const at::Tensor& factors) const;

  virtual void move_weights(const WeightStep& step) const = 0;

  /// True if `start` and `move_weights` read Scalar::on_device. Where it is null, they write the
  /// value to the device by a launch of their own.
  virtual bool reads_scalars() const { return false; }
};

/// elementwise/cpu.cpp: one pass over memory each, with the same bits on every machine.
const Elementwise& cpu_elementwise();

/// elementwise/aten.cpp: ATen's operators, on any device.
const Elementwise& aten_elementwise();

/// elementwise/cuda.cpp: dmuon's own CUDA kernels (kernels/cuda) where they serve, else as
/// aten_elementwise. For devices where why_no_cuda_kernels (cuda_kernels.h) is empty.
const Elementwise& cuda_elementwise();

/// The sides of an accelerator's x: tensor cores want rows of 16 bytes.
std::int64_t aligned(std::int64_t side, at::ScalarType dtype);

/// Returns what works on tensors of this device if the iteration runs in `dtype`; the default comes
/// first.
std::vector<const Elementwise*> elementwise_all(c10::Device device, at::ScalarType dtype);

/// The first of elementwise_all. Tests no kernels where they are not the default.
const Elementwise& default_elementwise(c10::Device device, at::ScalarType dtype);

/// The most memo_words of those that work on this device.
std::int64_t memo_words(c10::Device device);

/// PyTorch's operators, or the CPU's kernels: for tensors of this device in any dtype.
const Elementwise& elementwise_of(c10::Device device);

}  // namespace dmuon::newton_schulz
