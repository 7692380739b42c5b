#include "dmuon/engine/gradient_norms.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace dmuon::engine {

using core::ParameterIndex;

at::Tensor Verdict::norm() const { return squared_norms.sum().sqrt_(); }
at::Tensor Verdict::norms() const { return squared_norms.narrow(0, 0, has_gradient.size()).sqrt(); }
at::Tensor Verdict::finite() const { return at::isfinite(squared_norms.sum()); }
void Verdict::scale(const at::Tensor& factor) {
  squared_norms.mul_(factor.to(at::kDouble).square_());
}

GradientNorms::GradientNorms(const layout::Parameters& parameters, const wire::Owned& owned,
                             core::Slot slot, int num_slots, int num_host_shards)
    : owned_(owned), slot_(slot), num_parameters_(parameters.size()) {
  const c10::Device device = owned.pool()->device();
  std::vector<std::int64_t> parameter_of;
  for (const wire::GradientPiece& piece : owned.gradient_pieces())
    parameter_of.push_back(piece.parameter.value());
  parameter_of_ = at::tensor(parameter_of, at::kLong).to(device);
  const std::vector<double> weights{slot.value() < num_host_shards ? 1. : 0.,
                                    slot.value() == 0 ? 1. : 0.};
  host_weights_ = at::tensor(weights, at::kDouble).to(device);
  words_ = at::zeros({num_parameters_ + 2 * num_slots},
                     at::TensorOptions().dtype(at::kDouble).device(device));
}

const at::Tensor& GradientNorms::measure(const at::Tensor& host) {
  words_.zero_();
  words_.index_add_(0, parameter_of_, owned_.norms().square_());
  core::Vector<ParameterIndex, bool> unfilled(num_parameters_);
  for (const ParameterIndex parameter : unfilled.indices())
    unfilled[parameter] = owned_.owns(parameter) && !owned_.filled(parameter);
  without_here_.erase(words_, std::move(unfilled));
  // 0 times what is not finite is a NaN, which counts on every rank.
  if (host.defined())
    words_.narrow(0, num_parameters_ + 2 * slot_.value(), 2).copy_(host * host_weights_);
  return words_;
}

void GradientNorms::keep_only(const core::Vector<ParameterIndex, bool>& has_gradient) {
  core::Vector<ParameterIndex, bool> without(num_parameters_);
  for (const ParameterIndex parameter : without.indices())
    without[parameter] = !has_gradient[parameter];
  without_anywhere_.erase(words_, std::move(without));
}

void GradientNorms::Eraser::erase(const at::Tensor& words,
                                  core::Vector<ParameterIndex, bool> which) {
  if (which != which_) {
    std::vector<std::int64_t> indices;
    for (const ParameterIndex parameter : which.indices())
      if (which[parameter]) indices.push_back(parameter.value());
    // From pinned memory, so that nobody waits.
    const bool pins = !words.is_cpu();
    const at::Tensor host =
        at::empty({std::ssize(indices)}, at::TensorOptions().dtype(at::kLong).pinned_memory(pins));
    std::copy(indices.begin(), indices.end(), host.mutable_data_ptr<std::int64_t>());
    indices_ = host.to(words.device(), /*non_blocking=*/true);
    which_ = std::move(which);
  }
  if (indices_.numel() > 0) at::Tensor(words).index_fill_(0, indices_, 0);
}

}  // namespace dmuon::engine
