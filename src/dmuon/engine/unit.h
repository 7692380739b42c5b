#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/layout/packing.h"
#include "dmuon/wire/stream_mark.h"
#include "dmuon/wire/unit_buffers.h"

namespace dmuon::engine {

/// The parameters of a unit that autograd sees, leaves over its packed weights, and their gradients
/// on the way into its packed gradients.
///
/// A parameter may be a DTensor over its tensor of the buffer, with tensor parallelism. Its
/// gradients are DTensors too.
///
/// Weights exist between unshard and reshard, gradients between the first gradient of a backward
/// and its route. Not thread-safe; forward and backward threads never run at once. Streams:
/// autograd takes gradients on the stream on which bind() was called, wherever the model computes.
class Unit {
 public:
  /// @param all      leaves of the engine.
  /// @param buffers  outlives this.
  Unit(const layout::Leaves& all, wire::UnitBuffers* buffers);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const { return buffers_.name; }
  const layout::Packing& packing() const { return buffers_.packing; }

  /// Tensors over the buffer to make parameters of, one a leaf in packed order, in its sizes.
  std::vector<at::Tensor> weight_tensors() const;

  /// Returns the part of an accumulated gradient that this rank has of a leaf.
  using ToLocal = std::function<at::Tensor(core::LeafIndex, const at::Tensor& gradient)>;

  /// @param parameters   leaves over weight_tensors(), in packed order.
  /// @param on_gradient  called before an accumulated gradient is taken.
  /// @param to_local     called for gradients of DTensors, which it may redistribute; may be empty
  ///                     if there are none.
  void bind(std::vector<at::Tensor> parameters, const std::function<void()>& on_gradient,
            ToLocal to_local = {});

  /// A parameter of bind().
  const at::Tensor& parameter(layout::PackedLeafIndex leaf) const { return parameters_.at(leaf); }

  wire::PackedBuffer& weights() { return buffers_.weights; }
  wire::PackedBuffer& gradients() { return buffers_.gradients; }

  /// True if the leaf's gradient came since the last route.
  bool arrived(layout::PackedLeafIndex leaf) const { return arrived_[leaf]; }

  /// Before a backward use. On a CPU, where the parameter's dtype is the wire's, presets every
  /// .grad to its place in the (zeroed) packed buffer, where autograd then adds without a copy.
  /// Elsewhere autograd leaves its own tensor as .grad, which costs it nothing, and one kernel
  /// packs that.
  void expect_gradients();

  /// As if autograd had accumulated `value` into the leaf at this place.
  void put_gradient(layout::PackedLeafIndex leaf, const at::Tensor& value);

  /// The current stream goes on after all gradients that have come.
  void await_gradients() const { last_gradient_.wait(); }

  /// Missing gradients count as zeros: the whole buffer may travel afterwards, on what comes after
  /// the current stream.
  void fill_missing_gradients();

  /// Hands the packed gradients to the caller, who frees the buffer before the next use. Autograd
  /// adds to it no more.
  void hand_over_gradients();

  /// The gradients that had to be copied into the packed buffer, for a cast or because autograd put
  /// them elsewhere, since construction.
  std::int64_t num_gradient_copies() const { return num_gradient_copies_; }

 private:
  bool is_dtensor(layout::PackedLeafIndex leaf) const;
  bool presets(layout::PackedLeafIndex leaf) const { return begins_zero() && !is_dtensor(leaf); }
  bool begins_zero() const {
    const at::Tensor& weights = buffers_.weights.flat();
    return weights.is_cpu() && weights.scalar_type() == buffers_.gradients.flat().scalar_type();
  }
  void allocate_gradients();
  void take_gradient(layout::PackedLeafIndex leaf);

  wire::UnitBuffers& buffers_;
  core::Vector<layout::PackedLeafIndex, std::vector<std::int64_t>> sizes_;
  core::Vector<layout::PackedLeafIndex, at::Tensor> gradient_views_;
  core::Vector<layout::PackedLeafIndex, at::Tensor> parameters_;
  ToLocal to_local_;
  std::vector<std::any> registrations_;
  core::Vector<layout::PackedLeafIndex, bool> arrived_;
  wire::StreamMark last_gradient_;
  std::int64_t num_gradient_copies_ = 0;
};

}  // namespace dmuon::engine
