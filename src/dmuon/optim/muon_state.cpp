#include "dmuon/optim/muon_state.h"

#include <ATen/ops/lerp.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "dmuon/newton_schulz/orthogonalize.h"

namespace dmuon::optim {

void muon_update(at::Tensor master, at::Tensor momentum, const at::Tensor& gradient,
                 const MuonGroup& group) {
  momentum.lerp_(gradient, 1 - group.momentum);
  const at::Tensor update =
      group.nesterov ? at::lerp(gradient, momentum, group.momentum) : momentum;
  newton_schulz::Options options;
  options.coefficients = group.coefficients;
  options.eps = group.eps;
  options.dtype = group.ns_dtype;
  const at::Tensor orthogonal = newton_schulz::orthogonalize(update, options);
  if (group.lr * group.weight_decay != 0) master.mul_(1 - group.lr * group.weight_decay);
  master.add_(orthogonal, -adjust_lr(group.adjust_lr, group.lr, master.size(-2), master.size(-1)));
}

MuonState::MuonState(std::shared_ptr<engine::Engine> engine) : engine_(std::move(engine)) {
  for (const engine::OwnedBatch& batch : engine_->batches()) {
    momenta_.push_back(at::zeros_like(batch.master));
    engine_->count_bytes(static_cast<std::int64_t>(momenta_.back().nbytes()));
  }
}

void MuonState::step(const std::vector<MuonGroup>& groups, const std::vector<int>& group_of) {
  engine_->step([&](int batch) { update(static_cast<std::size_t>(batch), groups, group_of); });
}

void MuonState::update(std::size_t index, const std::vector<MuonGroup>& groups,
                       const std::vector<int>& group_of) {
  c10::AutoGradMode no_grad(false);
  engine::OwnedBatch& batch = engine_->batches()[index];
  const auto group = [&](std::size_t place) {
    return group_of.at(static_cast<std::size_t>(batch.matrices[place]));
  };
  // Neighbours of one group go together; mostly that is the whole batch.
  std::size_t end = 0;
  for (std::size_t begin = 0; begin < batch.matrices.size(); begin = end) {
    for (end = begin + 1; end < batch.matrices.size() && group(end) == group(begin);) ++end;
    if (group(begin) < 0) continue;
    const auto first = static_cast<std::int64_t>(begin);
    const auto count = static_cast<std::int64_t>(end - begin);
    muon_update(batch.master.narrow(0, first, count), momenta_[index].narrow(0, first, count),
                batch.gradient.narrow(0, first, count),
                groups.at(static_cast<std::size_t>(group(begin))));
  }
}

void MuonState::scale_gradients(double factor) {
  c10::AutoGradMode no_grad(false);
  for (engine::OwnedBatch& batch : engine_->batches()) batch.gradient.mul_(factor);
}

at::Tensor MuonState::momentum(int matrix) const {
  const engine::Place place = engine_->place(matrix);
  if (place.batch < 0) return {};
  return momenta_[static_cast<std::size_t>(place.batch)][static_cast<std::int64_t>(place.index)];
}

at::Tensor MuonState::master(int matrix) const {
  const engine::Place place = engine_->place(matrix);
  if (place.batch < 0) return {};
  return engine_->batches()[static_cast<std::size_t>(place.batch)]
      .master[static_cast<std::int64_t>(place.index)];
}

at::Tensor MuonState::gradient(int matrix) const {
  const engine::Place place = engine_->place(matrix);
  if (place.batch < 0) return {};
  return engine_->batches()[static_cast<std::size_t>(place.batch)]
      .gradient[static_cast<std::int64_t>(place.index)];
}

}  // namespace dmuon::optim
