#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace dmuon::newton_schulz {

/// The beginning of an iteration: X = scale x. The first products include the scale, so scaling
/// takes no pass over x.
struct Start {
  at::Tensor x;
  double scale = 1;
};

/// Operations element by element on one kind of device. An object is stateless and thread-safe,
/// works on the current stream, records no autograd, and never waits for an accelerator.
///
///     const Elementwise& elementwise = elementwise_of(weights.device());
///     const Start start =
///         elementwise.start(momentum, gradient, mu, nesterov, applies, dtype, eps);
///     ...  // orthogonalise
///     elementwise.move_weights(weights, decay, update, -lr, applies);
///
/// Momentum, gradient and weights are fp32, [..., rows, cols]; their matrices may lie apart in
/// memory. `applies` is [] bool on the device. If it is false, momentum and weights keep their
/// values whatever the gradient holds; a weight of zero may change its sign.
class Elementwise {
 public:
  virtual ~Elementwise() = default;

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
  virtual at::Tensor move_momentum(const at::Tensor& momentum, const at::Tensor& gradient,
                                   double mu, bool nesterov, const at::Tensor& applies) const = 0;

  /// Moves the momentum and normalises its direction. May do both in one pass over memory.
  /// If a gradient has a NaN or an infinity, its matrix's momentum and start have it too.
  /// @param momentum  one matrix, [rows, cols], or a batch, [..., rows, cols].
  /// @return  x in new memory, of normalise's sizes: [rows', cols'], or [b, rows', cols'] with b
  ///          the number of matrices.
  virtual Start start(const at::Tensor& momentum, const at::Tensor& gradient, double mu,
                      bool nesterov, const at::Tensor& applies, at::ScalarType dtype,
                      double eps) const;

  /// weights <- decay weights + factor update, in place.
  /// @param update  of weights' sizes, finite if the step does not apply; any dtype and strides.
  virtual void move_weights(const at::Tensor& weights, double decay, const at::Tensor& update,
                            double factor, const at::Tensor& applies) const = 0;
};

/// elementwise/cpu.cpp: one pass over memory each, with the same bits on every machine.
const Elementwise& cpu_elementwise();

/// elementwise/aten.cpp: ATen's operators, on any device.
const Elementwise& aten_elementwise();

/// The operations for tensors of this device.
const Elementwise& elementwise_of(c10::Device device);

}  // namespace dmuon::newton_schulz
