#include "dmuon/engine/unit.h"

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/autograd.h"

namespace dmuon::engine {

Unit::Unit(const layout::Leaves& all, wire::UnitBuffers* buffers)
    : buffers_(*buffers), arrived_(packing().leaves.size(), false) {
  for (const layout::PackedLeaf& leaf : packing().leaves) {
    sizes_.push_back(all[leaf.index].local_sizes());
    gradient_views_.push_back(buffers_.gradients.view(leaf.begin, sizes_.back()));
  }
}

std::vector<at::Tensor> Unit::weight_tensors() const {
  std::vector<at::Tensor> tensors;
  for (const layout::PackedLeafIndex i : sizes_.indices())
    tensors.push_back(buffers_.weights.view(packing().leaves[i].begin, sizes_[i]));
  return tensors;
}

void Unit::bind(std::vector<at::Tensor> parameters, const std::function<void()>& on_gradient,
                ToLocal to_local) {
  core::invariant(static_cast<int>(parameters.size()) == sizes_.size() && registrations_.empty(),
                  "Unit::bind: ", name(), " has ", sizes_.size(), " parameters and is bound once");
  parameters_ = core::Vector<layout::PackedLeafIndex, at::Tensor>(std::move(parameters));
  to_local_ = std::move(to_local);
  for (const layout::PackedLeafIndex i : parameters_.indices()) {
    registrations_.push_back(after_accumulation(parameters_[i], [this, i, on_gradient] {
      on_gradient();
      take_gradient(i);
    }));
  }
}

// A plain parameter has no functions of its own in Python.
bool Unit::is_dtensor(layout::PackedLeafIndex leaf) const {
  return parameters_[leaf].unsafeGetTensorImpl()->is_python_dispatch();
}

void Unit::allocate_gradients() {
  if (buffers_.gradients.allocated()) return;
  buffers_.gradients.allocate();
  // In-place accumulation starts from zero; a copy overwrites.
  if (begins_zero()) buffers_.gradients.flat().zero_();
}

void Unit::expect_gradients() {
  if (!begins_zero() || buffers_.gradients.allocated()) return;
  allocate_gradients();
  for (const layout::PackedLeafIndex i : parameters_.indices()) {
    if (presets(i) && parameters_[i].requires_grad())
      parameters_[i].mutable_grad() = gradient_views_[i];
  }
}

void Unit::take_gradient(layout::PackedLeafIndex leaf) {
  allocate_gradients();
  at::Tensor& grad = parameters_[leaf].mutable_grad();
  core::invariant(grad.defined(), "Unit::take_gradient: ", name(), ": no gradient to take");
  at::Tensor& packed = gradient_views_[leaf];
  const at::Tensor value =
      is_dtensor(leaf) ? to_local_(packing().leaves[leaf].index, grad) : grad.detach();
  if (value.const_data_ptr() != packed.const_data_ptr()) {
    // With a preset, autograd's own sum (create_graph) already holds what the buffer held.
    if (arrived_[leaf] && !presets(leaf)) {
      packed.add_(value);
    } else {
      packed.copy_(value);
    }
    ++num_gradient_copies_;
    if (presets(leaf)) {
      grad = packed;
    } else {
      grad.reset();
    }
  }
  last_gradient_.set(packed.device());
  arrived_[leaf] = true;
}

void Unit::put_gradient(layout::PackedLeafIndex leaf, const at::Tensor& value) {
  allocate_gradients();
  gradient_views_[leaf].copy_(value);
  last_gradient_.set(value.device());
  arrived_[leaf] = true;
}

void Unit::fill_missing_gradients() {
  last_gradient_.wait();
  allocate_gradients();
  if (begins_zero()) return;
  for (const layout::PackedLeafIndex i : arrived_.indices()) {
    if (!arrived_[i]) gradient_views_[i].zero_();
  }
}

void Unit::hand_over_gradients() {
  for (at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
  std::fill(arrived_.begin(), arrived_.end(), false);
}

}  // namespace dmuon::engine
