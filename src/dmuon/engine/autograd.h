#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <functional>
#include <vector>

namespace dmuon::engine {

// The few places where the engine meets autograd. Callbacks run on the thread that runs the
// backward, without the GIL; what they throw leaves through backward().

/// True if this thread is inside a backward, for example in a recomputed forward.
bool in_backward();

/// Calls `callback` whenever autograd has accumulated into `parameter.grad()`.
/// @return keeps the registration alive.
std::any after_accumulation(const at::Tensor& parameter, std::function<void()> callback);

/// Lets the gradients of `placeholder`, a leaf, accumulate into `parameter.grad()`, as if a graph
/// that has the placeholder had the parameter. The parameter's registration above outlives it.
void accumulate_into(const at::Tensor& parameter, const at::Tensor& placeholder);

/// The name of the node that before_leaving_backward() adds.
inline constexpr const char* kLeavingBackward = "DmuonLeavingBackward";

/// Returns tensors equal to `inputs`. The gradient of each passes through a node; the first of
/// these nodes in a backward calls `callback`. Autograd runs later nodes first, and accumulation
/// before all. So all gradients of the consumers of these inputs have been accumulated when
/// `callback` runs, if they were called in the thread that calls this: each thread counts its
/// nodes.
std::vector<at::Tensor> before_leaving_backward(const std::vector<at::Tensor>& inputs,
                                                std::function<void()> callback);

/// Returns the number of the innermost backward that runs on this thread; -1 outside of any.
int this_backward();

/// True where autograd runs a node of a backward whose gradients get a graph of their own, that is,
/// with create_graph=True.
bool creates_graph();

/// True inside a backward that keeps its graph for another one (retain_graph=True).
bool keeps_graph();

/// Calls `callback` when the gradient of `output` has been computed and is about to be used. If
/// autograd skips `output`, a view that was changed in place, its base's gradient counts.
void on_gradient_of(const at::Tensor& output, std::function<void()> callback);

/// Calls `callback` only where on_gradient_of() would for the base's gradient.
void on_skipped_gradient(const at::Tensor& output, std::function<void()> callback);

/// Calls `callback` when the backward that runs on this thread is over; not if it raises, but then
/// `callback` is destroyed.
void at_end_of_backward(std::function<void()> callback);

}  // namespace dmuon::engine
