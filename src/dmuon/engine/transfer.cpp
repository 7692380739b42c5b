// Owners' tensors leave for all ranks and come back, outside of steps.

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "dmuon/wire/shards.h"

namespace dmuon::engine {

at::Tensor Engine::gather(core::LeafIndex leaf, const std::string& name) {
  const c10::AutoGradMode no_grad(false);
  owned().require_name(name);
  drain();
  const auto options = at::TensorOptions().dtype(at::kFloat).device(options_.device);
  at::Tensor whole = at::empty(leaves().at(leaf).sizes, options);
  const at::Tensor flat = whole.view({-1});
  for (const OwnedPart& own : owned_parts(leaf, name))
    flat.narrow(0, own.elements.begin, own.elements.size()).copy_(own.tensor.view({-1}));
  const std::string what = "a whole " + name;
  std::int64_t end = 0;
  for (const core::ParameterIndex part : leaves()[leaf].parameters) {
    const core::Slot owner = parameters()[part].owner;
    const core::Shard column = layout().shard_of(owner);
    const std::int64_t begin = std::exchange(end, end + parameters()[part].num_elements());
    at::Tensor values = flat.narrow(0, begin, end - begin);
    if (column == mesh().shard())
      mesh().column().broadcast(values, layout().replicate_of(owner).value(), what).wait();
    mesh().row().broadcast(values, column.value(), what).wait();
  }
  return whole;
}

void Engine::scatter(core::LeafIndex leaf, const std::string& name, const at::Tensor& value) {
  const c10::AutoGradMode no_grad(false);
  const std::vector<std::int64_t>& sizes = leaves().at(leaf).sizes;
  core::require(value.numel() == c10::multiply_integers(sizes), "Engine::scatter: value: expected ",
                c10::multiply_integers(sizes), " elements, got ", value.numel());
  const at::Tensor flat = value.reshape({-1});
  for (OwnedPart& own : owned_parts(leaf, name)) {
    const layout::Segment& of = own.elements;
    own.tensor.copy_(flat.narrow(0, of.begin, of.size()).view(own.tensor.sizes()));
  }
}

std::vector<Engine::OwnedPart> Engine::owned_parts(core::LeafIndex leaf, const std::string& name) {
  owned().require_name(name);
  std::vector<OwnedPart> parts;
  std::int64_t end = 0;
  for (const core::ParameterIndex part : leaves().at(leaf).parameters) {
    const std::int64_t begin = std::exchange(end, end + parameters()[part].num_elements());
    if (owned().owns(part)) parts.push_back({part, {begin, end}, owned().of(part, name)});
  }
  return parts;
}

std::vector<at::Tensor> Engine::to_shards(const std::vector<core::LeafIndex>& which,
                                          const std::string& name, at::ScalarType dtype) {
  const c10::AutoGradMode no_grad(false);
  drain();
  const wire::Shards shards(&mesh(), leaves(), parameters(), owned(), num_host_shards());
  return shards.give(which, name, dtype);
}

void Engine::from_shards(const std::vector<core::LeafIndex>& which, const std::string& name,
                         const std::vector<at::Tensor>& shards) {
  const c10::AutoGradMode no_grad(false);
  drain();
  const wire::Shards all(&mesh(), leaves(), parameters(), owned(), num_host_shards());
  all.take(which, name, shards);
}

}  // namespace dmuon::engine
