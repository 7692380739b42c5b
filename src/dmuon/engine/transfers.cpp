// Moves what owners hold to all ranks, and back, outside of steps.

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "dmuon/wire/arrival.h"
#include "dmuon/wire/shards.h"

namespace dmuon::engine {

// All parts travel between nodes, then all inside nodes.
at::Tensor Engine::gather(core::LeafIndex leaf, const std::string& name) {
  const c10::AutoGradMode no_grad(false);
  owned().require_name(name);
  drain();
  const auto options = at::TensorOptions().dtype(at::kFloat).device(options_.device);
  at::Tensor whole = at::empty(owned().sizes_of(leaves().at(leaf), name), options);
  const at::Tensor flat = whole.view({-1});
  for (const OwnedPart& own : owned_parts(leaf, name))
    flat.narrow(0, own.elements.begin, own.elements.size()).copy_(own.tensor.view({-1}));
  for (const layout::Axis axis : {layout::Axis::kColumn, layout::Axis::kRow}) {
    const std::string what =
        core::message("a whole ", name, " of leaf ", leaf,
                      axis == layout::Axis::kColumn ? ", between nodes" : ", inside nodes");
    std::vector<wire::Pending> messages;
    for (const auto& [part, elements] : owned().parts_of(leaves()[leaf], name)) {
      const core::Slot owner = parameters()[part].owner;
      const bool elsewhere = layout().shard_of(owner) != mesh().shard();
      if (axis == layout::Axis::kColumn && elsewhere) continue;
      messages.push_back(mesh().along[axis].broadcast(
          flat.narrow(0, elements.begin, elements.size()), layout().member_of(owner, axis),
          core::message(what, ", parameter ", part)));  // in flight together, so by name
    }
    wire::await_arrival(&mesh(), options_.device, std::move(messages), what);
  }
  return whole;
}

void Engine::scatter(core::LeafIndex leaf, const std::string& name, const at::Tensor& value) {
  const c10::AutoGradMode no_grad(false);
  const std::int64_t elements = owned().num_elements(leaves().at(leaf), name);
  core::require(value.numel() == elements, "Engine::scatter: value: expected ", elements,
                " elements, got ", value.numel());
  const at::Tensor flat = value.reshape({-1});
  for (OwnedPart& own : owned_parts(leaf, name)) {
    const layout::Segment& of = own.elements;
    own.tensor.copy_(flat.narrow(0, of.begin, of.size()).view(own.tensor.sizes()));
  }
}

std::vector<Engine::OwnedPart> Engine::owned_parts(core::LeafIndex leaf, const std::string& name) {
  std::vector<OwnedPart> parts;
  for (const auto& [part, elements] : owned().parts_of(leaves().at(leaf), name))
    if (owned().owns(part)) parts.push_back({part, elements, owned().of(part, name)});
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
