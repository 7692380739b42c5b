#include "dmuon/engine/gradient_norms.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace dmuon::engine {

using core::ParameterIndex;

std::int64_t Verdict::num_counted() const {
  if (tensor_parallel == 1) return squared_norms.numel();
  const std::int64_t num_words = std::int64_t{tensor_parallel} * has_gradient.size();
  return num_words + (squared_norms.numel() - num_words) / 3 * 2;
}
at::Tensor Verdict::norm() const { return squared_norms.narrow(0, 0, num_counted()).sum().sqrt_(); }
at::Tensor Verdict::squared_norms_of_copies() const {
  return squared_norms.narrow(0, num_counted(), squared_norms.numel() - num_counted())
      .view({tensor_parallel, -1});
}
at::Tensor Verdict::squared_norms_of_ranks() const {
  const std::int64_t num_words = std::int64_t{tensor_parallel} * has_gradient.size();
  return squared_norms.narrow(0, 0, num_words).view({-1, tensor_parallel});
}
at::Tensor Verdict::norms() const {
  const at::Tensor of_ranks = squared_norms_of_ranks();
  return tensor_parallel == 1 ? of_ranks.view({-1}).sqrt() : of_ranks.sum(1).sqrt_();
}
at::Tensor Verdict::finite() const { return at::isfinite(squared_norms.sum()); }
void Verdict::scale(const at::Tensor& factor) {
  squared_norms.mul_(factor.to(at::kDouble).square());
}

GradientNorms::GradientNorms(wire::Owned& owned, const wire::SlicedParameters& sliced,
                             const layout::Mesh& mesh, core::Slot slot, int tensor_rank,
                             int num_host_shards)
    : owned_(owned),
      tensor_parallel_(mesh.tensor_parallel),
      tensor_rank_(tensor_rank),
      num_parameters_(owned.num_parameters()) {
  const c10::Device device = owned.pool()->device();
  host_words_ =
      num_parameters_ * tensor_parallel_ + 2 * (tensor_rank_ * mesh.num_slots() + slot.value());
  copies_word_ = num_parameters_ * tensor_parallel_ + 2 * mesh.num_owners() +
                 tensor_rank_ * mesh.num_slots() + slot.value();
  std::vector<std::int64_t> word_of;
  std::vector<double> parts;
  for (const wire::GradientPiece& piece : owned.gradient_pieces()) {
    word_of.push_back(this->word_of(piece.parameter, tensor_rank_));
    const bool everywhere = !sliced.empty() && sliced[piece.parameter].is_replicated();
    parts.push_back(everywhere ? 1. / tensor_parallel_ : 1.);
  }
  word_of_ = at::tensor(word_of, at::kLong).to(device);
  if (tensor_parallel_ > 1) parts_ = at::tensor(parts, at::kDouble).to(device);
  const std::vector<double> weights{slot.value() < num_host_shards ? 1. : 0.,
                                    slot.value() == 0 ? 1. : 0.};
  host_weights_ = at::tensor(weights, at::kDouble).to(device);
  const int words_of_rank = tensor_parallel_ > 1 ? 3 : 2;
  words_ = at::zeros({num_parameters_ * tensor_parallel_ + words_of_rank * mesh.num_owners()},
                     at::TensorOptions().dtype(at::kDouble).device(device));
}

void GradientNorms::set_num_maxima(int num_maxima) {
  words_ = at::zeros({words_.numel() - num_maxima_ + num_maxima}, words_.options());
  num_maxima_ = num_maxima;
}

const at::Tensor& GradientNorms::measure(const at::Tensor& host, const at::Tensor& maxima) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  words_.zero_();
  at::Tensor squares = owned_.norms().square_();
  if (parts_.defined()) squares.mul_(parts_);
  words_.index_add_(0, word_of_, squares);
  std::vector<bool> unfilled(static_cast<std::size_t>(num_parameters_ * tensor_parallel_));
  for (const ParameterIndex parameter : core::Indices<ParameterIndex>(num_parameters_))
    unfilled[static_cast<std::size_t>(word_of(parameter, tensor_rank_))] =
        owned_.owns(parameter) && !owned_.filled(parameter);
  without_here_.erase(words_, std::move(unfilled));
  // 0 times what is not finite is a NaN, which counts on every rank.
  if (host.defined()) words_.narrow(0, host_words_, 2).copy_(host.narrow(0, 0, 2) * host_weights_);
  if (host.defined() && host.numel() == 3)
    words_.narrow(0, copies_word_, 1).copy_(host.narrow(0, 2, 1));
  if (num_maxima_ > 0) {
    at::Tensor behind = words_.narrow(0, words_.numel() - num_maxima_, num_maxima_);
    maxima.defined() ? behind.copy_(maxima) : behind.fill_(-kInfinity);
  }
  at::nan_to_num_(words_, kInfinity, kInfinity, -kInfinity);
  return words_;
}

void GradientNorms::keep_only(const core::Vector<ParameterIndex, bool>& has_gradient) {
  std::vector<bool> without;
  for (const bool has : has_gradient)
    without.insert(without.end(), static_cast<std::size_t>(tensor_parallel_), !has);
  without_anywhere_.erase(words_, std::move(without));
}

void GradientNorms::Eraser::erase(const at::Tensor& words, std::vector<bool> which) {
  if (which != which_) {
    std::vector<std::int64_t> indices;
    for (std::size_t word = 0; word < which.size(); ++word)
      if (which[word]) indices.push_back(static_cast<std::int64_t>(word));
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
