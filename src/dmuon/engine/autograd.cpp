#include "dmuon/engine/autograd.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/wire/stream_mark.h"

namespace dmuon::engine {
namespace {

using torch::autograd::variable_list;

// Torch translates exceptions that leave a backward for Python, and knows its own ones alone.
std::function<void()> as_torch_errors(std::function<void()> callback) {
  return [callback = std::move(callback)] {
    try {
      callback();
    } catch (const core::InvalidArgument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
  };
}

// PyTorch 2.13 replaced a shared_ptr by an intrusive_ptr.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

class AfterAccumulation : public torch::autograd::FunctionPostHook {
 public:
  explicit AfterAccumulation(std::function<void()> callback) : callback_(std::move(callback)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    callback_();
    return outputs;
  }

 private:
  std::function<void()> callback_;
};

class LeavingBackward : public torch::autograd::Node {
 public:
  explicit LeavingBackward(std::function<void()> callback) : callback_(std::move(callback)) {}

  variable_list apply(variable_list&& gradients) override {
    callback_();
    return std::move(gradients);
  }

  std::string name() const override { return kLeavingBackward; }

 private:
  std::function<void()> callback_;
};

template <typename T>
std::weak_ptr<T> weak(const std::shared_ptr<T>& node) {
  return node;
}

template <typename T>
c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& node) {
  return c10::weak_intrusive_ptr<T>(node);
}

template <typename Concrete, typename Argument>
NodePtr make_node(Argument&& argument) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Concrete>(std::forward<Argument>(argument));
  } else {
    return c10::make_intrusive<Concrete>(std::forward<Argument>(argument));
  }
}

}  // namespace

int this_backward() { return torch::autograd::get_current_graph_task_id(); }

bool in_backward() { return this_backward() != -1; }

std::any after_accumulation(const at::Tensor& parameter, std::function<void()> callback) {
  NodePtr accumulator = torch::autograd::impl::grad_accumulator(parameter);
  accumulator->add_post_hook(
      std::make_unique<AfterAccumulation>(as_torch_errors(std::move(callback))));
  return accumulator;
}

void accumulate_into(const at::Tensor& parameter, const at::Tensor& placeholder) {
  torch::autograd::impl::set_grad_accumulator(
      placeholder, weak(torch::autograd::impl::grad_accumulator(parameter)));
}

std::vector<at::Tensor> before_leaving_backward(const std::vector<at::Tensor>& inputs,
                                                std::function<void()> callback) {
  const auto on_device =
      std::ranges::find_if(inputs, [](const at::Tensor& input) { return !input.is_cpu(); });
  const bool on_host = on_device == inputs.end();
  std::optional<c10::Stream> compute;
  if (!on_host) compute = wire::current_stream(on_device->device());
  const auto once_a_backward = [callback = as_torch_errors(std::move(callback)), compute,
                                last = std::make_shared<int>(-1)] {
    if (std::exchange(*last, this_backward()) == this_backward()) return;
    // Autograd lets a node wait for the gradient that comes to it, not for its consumer's other
    // work.
    if (compute) wire::order(*compute, wire::current_stream(compute->device()));
    callback();
  };
  // The nodes run on the stream of their consumer, as if they were not there. Autograd adds
  // gradients up in place where they arrive, without waiting for another branch that still reads
  // them.
  c10::OptionalStreamGuard on_producer;
  for (const at::Tensor& input : inputs) {
    const auto& producer = input.grad_fn();
    if (!producer || !producer->stream()) continue;
    on_producer.reset_stream(*producer->stream());
    break;
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    // A node of its own: a backward that does not come to this input must not go on behind it.
    // Autograd's thread for the host does not know how far the device's is.
    std::function<void()> leave = [] {};
    if (input.is_cpu() == on_host) leave = once_a_backward;
    NodePtr node = make_node<LeavingBackward>(std::move(leave));
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    outputs.push_back(input.detach());
    torch::autograd::set_history(outputs.back(), node);
  }
  return outputs;
}

bool creates_graph() { return in_backward() && c10::GradMode::is_enabled(); }

bool keeps_graph() { return in_backward() && torch::autograd::get_current_graph_task_keep_graph(); }

void on_gradient_of(const at::Tensor& output, std::function<void()> callback) {
  on_skipped_gradient(output, callback);
  output.register_hook([callback = as_torch_errors(std::move(callback))](
                           const at::Tensor& /*gradient*/) { callback(); });
}

void on_skipped_gradient(const at::Tensor& output, std::function<void()> callback) {
  if (!output.is_view()) return;
  const at::Tensor base(output._base());
  if (!base.requires_grad() || base.is_leaf()) return;
  auto last = std::make_shared<int>(-1);  // backward that came to the view
  output.register_hook([last](const at::Tensor& /*gradient*/) { *last = this_backward(); });
  base.register_hook(
      [callback = as_torch_errors(std::move(callback)), last](const at::Tensor& /*gradient*/) {
        if (*last != this_backward()) callback();
      });
}

void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      as_torch_errors(std::move(callback)));
}

}  // namespace dmuon::engine
