#include "dmuon/optim/muon_state.h"

#include <ATen/ops/lerp.h>
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

namespace {

void update(const engine::OwnedBatch& batch, const std::vector<MuonGroup>& groups,
            const core::Vector<core::ParameterIndex, int>& group_of) {
  const c10::AutoGradMode no_grad(false);
  const std::size_t size = batch.parameters.size();
  const auto group = [&](std::size_t place) { return group_of.at(batch.parameters[place]); };
  // Neighbours of one group go together; mostly that is the whole batch.
  std::size_t end = 0;
  for (std::size_t begin = 0; begin < size; begin = end) {
    end = begin + 1;
    while (end < size && group(end) == group(begin)) ++end;
    if (group(begin) < 0) continue;
    muon_update(batch.part(engine::kMaster, begin, end), batch.part(kMomentum, begin, end),
                batch.part(engine::kGradient, begin, end),
                groups.at(static_cast<std::size_t>(group(begin))));
  }
}

}  // namespace

MuonState::MuonState(std::shared_ptr<engine::Engine> engine) : engine_(std::move(engine)) {
  engine_->owned().add(kMomentum);
}

void MuonState::step(const std::vector<MuonGroup>& groups,
                     const core::Vector<core::ParameterIndex, int>& group_of) {
  engine_->step(
      [&](core::BatchIndex batch) { update(engine_->owned().batches()[batch], groups, group_of); });
}

}  // namespace dmuon::optim
