// What owners hold leaves for all ranks, and comes back, outside of steps.

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "dmuon/engine/shards.h"

namespace dmuon::engine {

at::Tensor Engine::gather(core::ParameterIndex parameter, const std::string& name) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor own = owned().of(parameter, name);
  drain();
  const auto options = at::TensorOptions().dtype(at::kFloat).device(options_.device);
  at::Tensor whole = at::empty(parameters()[parameter].sizes, options);
  if (own.defined()) whole.copy_(own);
  const core::Slot owner = parameters()[parameter].owner;
  const core::Shard column = layout().shard_of(owner);
  const std::string what = "a whole " + name;
  if (column == mesh().shard())
    mesh().column.broadcast(whole, layout().replicate_of(owner).value(), what).wait();
  mesh().row.broadcast(whole, column.value(), what).wait();
  return whole;
}

void Engine::scatter(core::ParameterIndex parameter, const std::string& name,
                     const at::Tensor& value) {
  const c10::AutoGradMode no_grad(false);
  const plan::View& view = parameters().at(parameter).view;
  core::require(value.numel() == view.num_elements(), "Engine::scatter: value: expected ",
                view.num_elements(), " elements, got ", value.numel());
  at::Tensor own = owned().of(parameter, name);
  if (own.defined()) own.copy_(value.reshape(own.sizes()));
}

std::vector<at::Tensor> Engine::to_shards(const std::vector<core::ParameterIndex>& which,
                                          const std::string& name, at::ScalarType dtype) {
  const c10::AutoGradMode no_grad(false);
  drain();
  return engine::to_shards(mesh(), parameters(), owned(), which, name, dtype, num_host_shards());
}

void Engine::from_shards(const std::vector<core::ParameterIndex>& which, const std::string& name,
                         const std::vector<at::Tensor>& shards) {
  const c10::AutoGradMode no_grad(false);
  drain();
  engine::from_shards(mesh(), parameters(), owned(), which, name, shards, num_host_shards());
}

}  // namespace dmuon::engine
