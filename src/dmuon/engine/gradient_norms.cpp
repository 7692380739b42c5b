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

at::Tensor Verdict::norm() const {
  return squared_norms.narrow(0, 0, words.copies()).sum().sqrt_();
}
at::Tensor Verdict::squared_norms_of_copies() const {
  return squared_norms.narrow(0, words.copies(), words.maxima() - words.copies())
      .view({words.tensor_parallel, -1});
}
at::Tensor Verdict::squared_norms_of_ranks() const {
  return squared_norms.narrow(0, 0, words.host()).view({-1, words.tensor_parallel});
}
at::Tensor Verdict::norms() const {
  const at::Tensor of_ranks = squared_norms_of_ranks();
  return words.tensor_parallel == 1 ? of_ranks.view({-1}).sqrt() : of_ranks.sum(1).sqrt_();
}
at::Tensor Verdict::finite() const { return at::isfinite(squared_norms.sum()); }
void Verdict::scale(const at::Tensor& factor) {
  squared_norms.mul_(factor.to(at::kDouble).square());
}

GradientNorms::GradientNorms(wire::Owned& owned, const wire::SlicedParameters& sliced,
                             const layout::Mesh& mesh, core::Slot slot, int tensor_rank,
                             int num_host_shards)
    : owned_(owned),
      at_{owned.num_parameters(), mesh.tensor_parallel, mesh.num_slots()},
      slot_(slot),
      tensor_rank_(tensor_rank) {
  const c10::Device device = owned.pool()->device();
  std::vector<std::int64_t> word_of;
  std::vector<double> parts;
  for (const wire::GradientPiece& piece : owned.gradient_pieces()) {
    word_of.push_back(at_.of(piece.parameter, tensor_rank_));
    const bool everywhere = !sliced.empty() && sliced[piece.parameter].is_replicated();
    parts.push_back(everywhere ? 1. / at_.tensor_parallel : 1.);
  }
  word_of_ = at::tensor(word_of, at::kLong).to(device);
  if (at_.tensor_parallel > 1) parts_ = at::tensor(parts, at::kDouble).to(device);
  const std::vector<double> weights{slot.value() < num_host_shards ? 1. : 0.,
                                    slot.value() == 0 ? 1. : 0.};
  host_weights_ = at::tensor(weights, at::kDouble).to(device);
  words_ = at::zeros({at_.size()}, at::TensorOptions().dtype(at::kDouble).device(device));
}

void GradientNorms::set_num_maxima(int num_maxima) {
  at_.num_maxima = num_maxima;
  words_ = at::zeros({at_.size()}, words_.options());
}

const at::Tensor& GradientNorms::measure(const at::Tensor& host, const at::Tensor& maxima) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  words_.zero_();
  at::Tensor squares = owned_.norms().square_();
  if (parts_.defined()) squares.mul_(parts_);
  words_.index_add_(0, word_of_, squares);
  std::vector<bool> unfilled(static_cast<std::size_t>(at_.host()));
  for (const ParameterIndex parameter : core::Indices<ParameterIndex>(at_.num_parameters))
    unfilled[static_cast<std::size_t>(at_.of(parameter, tensor_rank_))] =
        owned_.owns(parameter) && !owned_.filled(parameter);
  without_here_.erase(words_, std::move(unfilled));
  // 0 times what is not finite is a NaN, which counts on every rank.
  if (host.defined()) {
    const at::Tensor counted = host.narrow(0, 0, 2) * host_weights_;
    words_.narrow(0, at_.of_host(tensor_rank_, slot_), 2).copy_(counted);
  }
  if (host.defined() && host.numel() == 3)
    words_.narrow(0, at_.of_copies(tensor_rank_, slot_), 1).copy_(host.narrow(0, 2, 1));
  if (at_.num_maxima > 0) {
    at::Tensor behind = words_.narrow(0, at_.maxima(), at_.num_maxima);
    maxima.defined() ? behind.copy_(maxima) : behind.fill_(-kInfinity);
  }
  at::nan_to_num_(words_, kInfinity, kInfinity, -kInfinity);
  return words_;
}

void GradientNorms::keep_only(const core::Vector<ParameterIndex, bool>& has_gradient) {
  std::vector<bool> without;
  for (const bool has : has_gradient)
    without.insert(without.end(), static_cast<std::size_t>(at_.tensor_parallel), !has);
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
