#include "dmuon/engine/placeholders.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/autograd.h"

namespace dmuon::engine {

Placeholders::Placeholders(int num_leaves)
    : given_(num_leaves, false), cleared_(num_leaves, false) {}

void Placeholders::set(Tensors placeholders, Tensors gradients) {
  const int expected = given_.size();
  core::invariant(placeholders.size() == expected && gradients.size() == expected,
                  "Placeholders::set: expected ", expected, " of each");
  placeholders_ = std::move(placeholders);
  gradients_ = std::move(gradients);
}

void Placeholders::accumulate(core::LeafIndex leaf, const at::Tensor& parameter) const {
  if (!placeholders_.empty()) accumulate_into(parameter, placeholders_.at(leaf));
}

void Placeholders::give_gradients() {
  for (const core::LeafIndex leaf : placeholders_.indices()) {
    at::Tensor& placeholder = placeholders_[leaf];
    if (!placeholder.requires_grad()) continue;
    placeholder.mutable_grad() = gradients_[leaf];
    given_[leaf] = true;
  }
}

Placeholders::PerLeaf Placeholders::kept() const {
  PerLeaf all(given_.size(), true);
  for (const core::LeafIndex leaf : placeholders_.indices())
    all[leaf] = placeholders_[leaf].grad().defined();
  return all;
}

bool Placeholders::all_cleared() const {
  const auto trains = [](const at::Tensor& of) { return of.requires_grad(); };
  const PerLeaf held = kept();
  return std::any_of(placeholders_.begin(), placeholders_.end(), trains) &&
         std::none_of(held.begin(), held.end(), std::identity());
}

void Placeholders::note_cleared() {
  const PerLeaf held = kept();
  for (const core::LeafIndex leaf : given_.indices())
    if (given_[leaf] && !held[leaf]) cleared_[leaf] = true;
}

}  // namespace dmuon::engine
