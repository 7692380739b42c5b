#include "dmuon/engine/transfers.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/wire/arrival.h"

namespace dmuon::engine {

// All parts travel between nodes, then all inside nodes.
at::Tensor Transfers::gather(core::LeafIndex leaf, const std::string& name) const {
  const c10::AutoGradMode no_grad(false);
  const wire::Owned& owned = executor_.owned();
  wire::SharedMesh& mesh = executor_.mesh();
  const layout::Mesh shape = mesh.shape();
  const c10::Device device = executor_.pool().device();
  owned.require_name(name);
  drain_();
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  at::Tensor whole = at::empty(sizes_of(leaf, name), options);
  const at::Tensor flat = whole.view({-1});
  for (const OwnedPart& own : owned_parts(leaf, name))
    flat.narrow(0, own.elements.begin, own.elements.size()).copy_(own.tensor.view({-1}));
  for (const layout::Axis axis : {layout::Axis::kColumn, layout::Axis::kRow}) {
    const std::string what =
        core::message("a whole ", name, " of leaf ", leaf,
                      axis == layout::Axis::kColumn ? ", between nodes" : ", inside nodes");
    std::vector<wire::Pending> messages;
    for (const auto& [part, elements] : owned.parts_of(executor_.leaves()[leaf], name)) {
      const core::Slot owner = executor_.parameters()[part].owner;
      const bool elsewhere = shape.shard_of(owner) != mesh.shard();
      if (axis == layout::Axis::kColumn && elsewhere) continue;
      messages.push_back(mesh.along[axis].broadcast(
          flat.narrow(0, elements.begin, elements.size()), shape.member_of(owner, axis),
          core::message(what, ", parameter ", part)));  // in flight together, so by name
    }
    wire::await_arrival(&mesh, device, std::move(messages), what);
  }
  return whole;
}

void Transfers::scatter(core::LeafIndex leaf, const std::string& name,
                        const at::Tensor& value) const {
  const c10::AutoGradMode no_grad(false);
  const std::int64_t elements = executor_.owned().num_elements(executor_.leaves().at(leaf), name);
  core::require(value.numel() == elements, "Transfers::scatter: value: expected ", elements,
                " elements, got ", value.numel());
  const at::Tensor flat = value.reshape({-1});
  for (OwnedPart& own : owned_parts(leaf, name)) {
    const layout::Segment& of = own.elements;
    own.tensor.copy_(flat.narrow(0, of.begin, of.size()).view(own.tensor.sizes()));
  }
}

std::vector<Transfers::OwnedPart> Transfers::owned_parts(core::LeafIndex leaf,
                                                         const std::string& name) const {
  finish_update_();
  wire::Owned& owned = executor_.owned();
  std::vector<OwnedPart> parts;
  for (const auto& [part, elements] : owned.parts_of(executor_.leaves().at(leaf), name))
    if (owned.owns(part)) parts.push_back({part, elements, owned.of(part, name)});
  return parts;
}

std::vector<at::Tensor> Transfers::to_shards(const std::vector<core::LeafIndex>& which,
                                             const std::string& name, at::ScalarType dtype) const {
  const c10::AutoGradMode no_grad(false);
  drain_();
  return shards().give(which, name, dtype);
}

void Transfers::from_shards(const std::vector<core::LeafIndex>& which, const std::string& name,
                            const std::vector<at::Tensor>& shards) const {
  const c10::AutoGradMode no_grad(false);
  drain_();
  this->shards().take(which, name, shards);
}

wire::Shards Transfers::shards() const {
  return {&executor_.mesh(), executor_.leaves(), executor_.parameters(), executor_.owned(),
          num_host_shards_};
}

}  // namespace dmuon::engine
