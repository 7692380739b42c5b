#include "dmuon/wire/owned.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/core/named.h"

namespace dmuon::wire {

using core::ParameterIndex;

namespace {

// A piece takes memory of its own: 16 MB to be exchanged, and 32 MB in fp64 where CPUs measure it.
constexpr std::int64_t kOwnedPiece = std::int64_t{1} << 22;

std::vector<std::int64_t> whole_matrix(const layout::View& view) { return {view.rows, view.cols}; }

std::vector<std::int64_t> stacked(std::int64_t num_matrices, std::vector<std::int64_t> sizes) {
  sizes.insert(sizes.begin(), num_matrices);
  return sizes;
}

}  // namespace

at::Tensor OwnedBatch::part(const std::string& name, std::size_t begin, std::size_t end) const {
  return tensors.at(name).narrow(0, first_matrix[begin], first_matrix[end] - first_matrix[begin]);
}

Owned::Owned(const layout::Parameters& all, const std::vector<std::vector<ParameterIndex>>& batches,
             std::shared_ptr<BufferPool> pool)
    : all_(all),
      positions_(all.size()),
      named_{{kMaster, whole_matrix}, {kGradient, whole_matrix}},
      pool_(std::move(pool)) {
  for (const std::vector<ParameterIndex>& parameters : batches) {
    const layout::View& view = all[parameters.at(0)].view;
    OwnedBatch batch{parameters, view, {0}, {}};
    const auto index = core::BatchIndex(batches_.size());
    for (const ParameterIndex parameter : parameters) {
      positions_.at(parameter) = {index, static_cast<std::int64_t>(batch.first_matrix.size()) - 1};
      batch.first_matrix.push_back(batch.first_matrix.back() + all[parameter].view.num_matrices);
    }
    for (const Named& named : named_) {
      at::Tensor& tensor = batch.tensors[named.name];
      tensor = pool_->empty(stacked(batch.first_matrix.back(), named.sizes(view)), at::kFloat);
      pool_->count(static_cast<std::int64_t>(tensor.nbytes()));
    }
    batches_.push_back(std::move(batch));
  }
  for (const ParameterIndex parameter : positions_.indices()) {
    Position& position = positions_[parameter];
    if (position.index < 0) continue;
    position.master = view_of(parameter, kMaster);
    position.gradient = stack(position, kGradient).view({-1});
  }
}

void add_scaled(at::Tensor target, const at::Tensor& values, double scale, bool adds) {
  if (adds) {
    target.add_(values, scale);
  } else if (values.scalar_type() == at::kFloat) {
    at::mul_out(target, values, at::scalar_tensor(scale, at::TensorOptions().dtype(at::kDouble)));
  } else {
    target.copy_(values);
    if (scale != 1) target.mul_(scale);
  }
}

void Owned::add(const std::string& name, MatrixSizes sizes) {
  core::require(!has_name(name), "Owned::add: name: expected a new one, got '", name, "'");
  if (!sizes) sizes = whole_matrix;
  core::Vector<core::BatchIndex, at::Tensor>
      made;  // all, before anything changes: memory may not suffice
  for (const OwnedBatch& batch : batches_) {
    made.push_back(pool_->empty(stacked(batch.first_matrix.back(), sizes(batch.view)), at::kFloat));
    made.back().zero_();
  }
  named_.push_back({name, std::move(sizes)});
  for (const core::BatchIndex index : batches_.indices()) {
    batches_[index].tensors[name] = made[index];
    pool_->count(static_cast<std::int64_t>(made[index].nbytes()));
  }
}

void Owned::remove(const std::string& name) {
  require_name(name);
  std::erase_if(named_, [&](const Named& named) { return named.name == name; });
  for (OwnedBatch& batch : batches_) {
    pool_->count(-static_cast<std::int64_t>(batch.tensors.at(name).nbytes()));
    batch.tensors.erase(name);
  }
}

void Owned::exchange(const std::string& first, const std::string& second) {
  require_name(first);
  require_name(second);
  std::int64_t largest = 0;
  for (const OwnedBatch& batch : batches_)
    largest = std::max(largest, batch.tensors.at(first).numel());
  // Before anything changes: memory may not suffice.
  const at::Tensor spare = pool_->empty({std::min(largest, kOwnedPiece)}, at::kFloat);
  for (const OwnedBatch& batch : batches_) {
    const auto pieces = [&](const std::string& name) {
      return batch.tensors.at(name).view({-1}).split(kOwnedPiece);
    };
    const std::vector<at::Tensor> others = pieces(second);
    std::size_t index = 0;
    for (at::Tensor& piece : pieces(first)) {
      const at::Tensor& other = others[index++];
      const at::Tensor kept = spare.narrow(0, 0, piece.numel()).copy_(piece);
      piece.copy_(other);
      other.copy_(kept);
    }
  }
}

at::Tensor Owned::stack(const Position& position, const std::string& name) const {
  const auto index = static_cast<std::size_t>(position.index);
  return batches_[position.batch].part(name, index, index + 1);
}

bool Owned::has_name(const std::string& name) const {
  return std::ranges::find(named_, name, &Named::name) != named_.end();
}

const Owned::Named& Owned::named(const std::string& name) const {
  return core::named(named_, name, "owned tensors: name: expected", &Named::name);
}

std::vector<std::int64_t> Owned::sizes_of(ParameterIndex parameter, const std::string& name) const {
  const layout::View& view = all_.at(parameter).view;
  std::vector<std::int64_t> sizes = named(name).sizes(view);
  return view.num_matrices == 1 ? sizes : stacked(view.num_matrices, std::move(sizes));
}

at::Tensor Owned::of(ParameterIndex parameter, const std::string& name) {
  if (name == kGradient) multiply_factor_in();
  return view_of(parameter, name);
}

at::Tensor Owned::view_of(ParameterIndex parameter, const std::string& name) const {
  const std::vector<std::int64_t> sizes = sizes_of(parameter, name);
  if (!owns(parameter)) return {};
  return stack(positions_[parameter], name).view(sizes);
}

std::vector<Owned::Part> Owned::parts_of(const layout::Leaf& leaf, const std::string& name) const {
  std::vector<Part> parts;
  std::int64_t end = 0;
  for (const ParameterIndex parameter : leaf.parameters) {
    const std::int64_t begin = end;
    end += c10::multiply_integers(sizes_of(parameter, name));
    parts.push_back({parameter, {begin, end}});
  }
  return parts;
}

std::vector<std::int64_t> Owned::sizes_of(const layout::Leaf& leaf, const std::string& name) const {
  const std::int64_t elements = num_elements(leaf, name);
  if (elements == c10::multiply_integers(leaf.sizes)) return leaf.sizes;
  if (leaf.parameters.size() == 1) return sizes_of(leaf.parameters[0], name);
  std::int64_t num_matrices = 0;
  for (const ParameterIndex part : leaf.parameters) num_matrices += all_[part].view.num_matrices;
  std::vector<std::int64_t> sizes = named(name).sizes(all_[leaf.parameters[0]].view);
  if (c10::multiply_integers(sizes) * num_matrices != elements) return {elements};
  return stacked(num_matrices, std::move(sizes));
}

std::int64_t Owned::rows_of(const layout::Leaf& leaf, const std::string& name) const {
  const std::int64_t first = sizes_of(leaf, name).front();
  const std::int64_t rows = leaf.sizes.front();
  return first == 1 || num_elements(leaf, name) % rows != 0 ? first : rows;
}

void Owned::accumulate(ParameterIndex parameter, std::int64_t begin, const at::Tensor& values,
                       double scale) {
  core::invariant(!gradient_factor_.defined(), "Owned::accumulate: a factor waits");
  const Position& position = positions_.at(parameter);
  add_scaled(position.gradient.narrow(0, begin, values.numel()), values, scale * gradient_scale_,
             position.filled);
}

// A second factor is no product with the first: rounding twice gives the bits of two passes.
void Owned::scale_gradients(const at::Tensor& factor) {
  multiply_factor_in();
  gradient_factor_ = factor.to(at::kFloat);
}

void Owned::multiply_factor_in() {
  const at::Tensor factor = std::exchange(gradient_factor_, {});
  if (!factor.defined()) return;
  const c10::AutoGradMode no_grad(false);
  for (const OwnedBatch& batch : batches_) {
    if (std::ranges::any_of(batch.parameters, [&](ParameterIndex of) { return filled(of); }))
      at::Tensor(batch.tensors.at(kGradient)).mul_(factor);
  }
}

std::vector<GradientPiece> Owned::gradient_pieces() {
  multiply_factor_in();
  std::vector<GradientPiece> pieces;
  for (const OwnedBatch& batch : batches_) {
    for (std::size_t position = 0; position < batch.parameters.size(); ++position) {
      const at::Tensor whole = batch.part(kGradient, position, position + 1).view({-1});
      for (const at::Tensor& values : whole.split(kOwnedPiece))
        pieces.push_back({batch.parameters[position], values});
    }
  }
  return pieces;
}

at::Tensor Owned::norms() {
  std::vector<at::Tensor> gradients;
  for (const GradientPiece& piece : gradient_pieces()) gradients.push_back(piece.values);
  if (gradients.empty())
    return at::empty({0}, at::TensorOptions().dtype(at::kDouble).device(pool_->device()));
  // fp64 throughout: squares of gradients as small as 1e-30 or as large as 1e30 leave fp32's range.
  // One kernel for all, which converts while it reads: a reduction would convert to memory first.
  return at::stack(at::_foreach_norm(gradients, 2, at::kDouble));
}

}  // namespace dmuon::wire
