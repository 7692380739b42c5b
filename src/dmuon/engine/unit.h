#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/engine/buffer.h"
#include "dmuon/engine/lane.h"
#include "dmuon/engine/packing.h"
#include "dmuon/engine/stream_mark.h"
#include "dmuon/schedule/operation.h"

namespace dmuon::engine {

/// What one module's hooks move together: a packed buffer of weights, one of gradients, and the
/// parameters that autograd sees, which are leaves over the first.
///
/// Weights exist between unshard and reshard, gradients between the first gradient of a backward
/// and its route. Not thread-safe; forward and backward threads never run at once. Streams:
/// autograd takes gradients on the stream on which bind() was called, wherever the model computes.
class Unit {
 public:
  /// @param all            leaves of the engine.
  /// @param compute_dtype  of the weights as the module sees them.
  /// @param reduce_dtype   of the gradients as they travel.
  Unit(std::string name, const Leaves& all, Packing packing,
       const std::shared_ptr<BufferPool>& pool, at::ScalarType compute_dtype,
       at::ScalarType reduce_dtype);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const { return name_; }
  const Packing& packing() const { return packing_; }

  /// Tensors over the buffer to make parameters of, one a leaf in packed order, in its sizes.
  std::vector<at::Tensor> weight_tensors() const;

  /// @param parameters   leaves over weight_tensors(), in packed order.
  /// @param on_gradient  called before an accumulated gradient is taken.
  void bind(std::vector<at::Tensor> parameters, const std::function<void()>& on_gradient);

  PackedBuffer& weights() { return weights_; }
  PackedBuffer& gradients() { return gradients_; }

  /// Whether its gradient came since the last route.
  bool arrived(PackedLeafIndex leaf) const { return arrived_[leaf]; }

  /// Before a backward use. On a CPU, where the parameter's dtype is the wire's, presets every
  /// .grad to its place in the (zeroed) packed buffer, where autograd then adds without a copy.
  /// Elsewhere autograd leaves its own tensor as .grad, which costs it nothing, and one kernel
  /// packs that.
  void expect_gradients();

  /// As if autograd had accumulated `value` into the leaf at this place.
  void put_gradient(PackedLeafIndex leaf, const at::Tensor& value);

  /// The current stream goes on after all gradients that have come.
  void await_gradients() const { last_gradient_.wait(); }

  /// Missing gradients count as zeros: the whole buffer may travel afterwards, on what comes after
  /// the current stream.
  void fill_missing_gradients();

  /// The gradients that have come are the caller's, who frees the buffer before the next use;
  /// autograd adds to it no more.
  void hand_over_gradients();

  /// The gradients that had to be copied into the packed buffer, for a cast or because autograd put
  /// them elsewhere, since construction.
  std::int64_t num_gradient_copies() const { return num_gradient_copies_; }

 private:
  bool presets() const {
    const at::Tensor& weights = weights_.flat();
    return weights.is_cpu() && weights.scalar_type() == gradients_.flat().scalar_type();
  }
  void allocate_gradients();
  void take_gradient(PackedLeafIndex leaf);

  std::string name_;
  Packing packing_;
  core::Vector<PackedLeafIndex, std::vector<std::int64_t>> sizes_;
  PackedBuffer weights_;
  PackedBuffer gradients_;
  core::Vector<PackedLeafIndex, at::Tensor> gradient_views_;
  core::Vector<PackedLeafIndex, at::Tensor> parameters_;
  std::vector<std::any> registrations_;
  core::Vector<PackedLeafIndex, bool> arrived_;
  StreamMark last_gradient_;
  std::int64_t num_gradient_copies_ = 0;
};

/// A unit, and the buffers through which its weights and gradients travel.
struct UnitState {
  std::unique_ptr<Unit> unit;
  std::unique_ptr<PackedBuffer> node_copy;   ///< [own column]; null where there is none
  std::unique_ptr<PackedBuffer> inbox;       ///< of stage 1 of the route that is in flight
  std::unique_ptr<PackedBuffer> node_mean;   ///< [own column] between its stages
  std::unique_ptr<PackedBuffer> node_inbox;  ///< of stage 2
  std::unique_ptr<PackedBuffer> partial;     ///< fp32 [own column] what no_sync kept; else null
  bool host = false;                         ///< see schedule::UnitLayout
  core::Vector<PackedIndex, bool> partial_filled;
  core::Vector<PackedIndex, bool> has_gradient;  ///< on this rank, since it was cleared
  StreamMark weights_used;                       ///< or awaited, whatever stream that was on
  std::array<Event, schedule::kNumKinds> done;   ///< the newest operation of each kind
  std::array<std::int64_t, schedule::kNumKinds> numbers{};  ///< of these, see Watch

  const Packing& packing() const { return unit->packing(); }
};

}  // namespace dmuon::engine
