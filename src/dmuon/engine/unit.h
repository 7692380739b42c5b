#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/engine/buffer.h"
#include "dmuon/engine/packing.h"

namespace dmuon::engine {

/// The matrices of one module whose hooks move them together: a packed buffer of weights, one of
/// gradients, and the parameters that autograd sees, which are leaves over the first.
///
/// Weights exist between unshard and reshard, gradients between the first gradient of a backward
/// and its route. Not thread-safe; forward and backward threads never run at once.
class Unit {
 public:
  /// @param specs          of all matrices of the engine.
  /// @param compute_dtype  of the weights as the module sees them.
  /// @param reduce_dtype   of the gradients as they travel.
  Unit(std::string name, const std::vector<MatrixSpec>& specs, Packing packing,
       const std::shared_ptr<BufferPool>& pool, at::ScalarType compute_dtype,
       at::ScalarType reduce_dtype);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const { return name_; }
  const Packing& packing() const { return packing_; }

  /// [matrices, in packed order] [rows, cols] views to make parameters of.
  std::vector<at::Tensor> views() const;

  /// @param parameters   leaves over views(), in packed order.
  /// @param on_gradient  called before an accumulated gradient is taken.
  void bind(std::vector<at::Tensor> parameters, const std::function<void()>& on_gradient);

  PackedBuffer& weights() { return weights_; }
  PackedBuffer& gradients() { return gradients_; }

  /// Whether any gradient came since the last route.
  bool has_gradients() const;
  bool arrived(std::size_t place) const { return arrived_[place]; }

  /// Before a backward use. Where the parameter's dtype is the wire's, presets every .grad to its
  /// place in the (zeroed) packed buffer, where autograd then adds without a copy.
  void expect_gradients();

  /// As if autograd had accumulated `gradient` into the matrix at this place.
  void put_gradient(std::size_t place, const at::Tensor& value);

  /// Missing gradients count as zeros: the whole buffer may travel afterwards.
  void fill_missing_gradients();

  /// The gradients that have come are the caller's, who frees the buffer before the next use;
  /// autograd adds to it no more.
  void hand_over_gradients();

  /// The gradients that had to be copied into the packed buffer, for a cast or because autograd put
  /// them elsewhere, since construction.
  std::int64_t num_gradient_copies() const { return num_gradient_copies_; }

 private:
  bool presets() const { return weights_.flat().scalar_type() == gradients_.flat().scalar_type(); }
  at::Tensor gradient(std::size_t place) const;
  void allocate_gradients();
  void take_gradient(std::size_t place);

  std::string name_;
  Packing packing_;
  std::vector<MatrixSpec> specs_;  // in packed order
  PackedBuffer weights_;
  PackedBuffer gradients_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::any> registrations_;
  std::vector<bool> arrived_;
  std::int64_t num_gradient_copies_ = 0;
};

}  // namespace dmuon::engine
