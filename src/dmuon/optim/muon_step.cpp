#include "dmuon/optim/muon_step.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/optim/slice_update.h"

namespace dmuon::optim {
namespace {

const std::string kMemo = "memo";  // newton_schulz::MomentumStep::memo

void check(const at::Tensor& master, const at::Tensor& momentum, const at::Tensor& gradient) {
  for (const auto& [name, tensor] :
       {std::pair{"master", master}, {"momentum", momentum}, {"gradient", gradient}}) {
    core::require(tensor.defined() && tensor.dim() >= 2 && tensor.layout() == at::kStrided &&
                      tensor.scalar_type() == at::kFloat && tensor.device() == master.device() &&
                      tensor.sizes() == master.sizes(),
                  "update: ", name,
                  " must be dense fp32 of master's sizes, [..., rows, cols], on its ",
                  "device; got ", tensor.defined() ? tensor.toString() : "nothing", " ",
                  tensor.defined() ? tensor.sizes() : at::IntArrayRef());
  }
}

}  // namespace

void muon_update(const at::Tensor& master, const at::Tensor& momentum, const at::Tensor& gradient,
                 const MuonGroup& group, const at::Tensor& applies, std::int64_t column_blocks,
                 bool transposed, const std::optional<at::Tensor>& memo) {
  check(master, momentum, gradient);
  const c10::AutoGradMode no_grad(false);
  BatchUpdate update(group,
                     {.weights = master,
                      .gradient = gradient,
                      .states = {momentum},
                      .applies = applies,
                      .memo = memo.value_or(at::Tensor()),
                      .transposed = transposed},
                     column_blocks);
  update.prepare();
  update.orthogonalise();
  update.apply();
}

MuonUpdate::MuonUpdate(const wire::Owned& owned, std::vector<MuonGroup> groups,
                       core::Vector<core::ParameterIndex, int> group_of, at::Tensor applies)
    : owned_(owned),
      groups_(std::move(groups)),
      group_of_(std::move(group_of)),
      applies_(std::move(applies)),
      updates_(owned.batches().size()) {
  for (const wire::OwnedBatch& batch : owned.batches()) runs_.push_back(runs_of(batch));
}

// Mostly the whole batch is of one group.
std::vector<MuonUpdate::Run> MuonUpdate::runs_of(const wire::OwnedBatch& batch) {
  std::vector<Run> runs;
  const std::size_t size = batch.parameters.size();
  const auto group = [&](std::size_t index) { return group_of_.at(batch.parameters[index]); };
  std::size_t end = 0;
  for (std::size_t begin = 0; begin < size; begin = end) {
    end = begin + 1;
    while (end < size && group(end) == group(begin)) ++end;
    if (group(begin) < 0) continue;
    const MuonGroup& of_these = groups_.at(static_cast<std::size_t>(group(begin)));
    const layout::View& view = batch.view;
    const std::size_t place = scalars_->add(
        of_these.rule->scalars(view.rows, view.cols / view.column_blocks, view.transposed));
    runs.push_back({begin, end, &of_these, place});
  }
  return runs;
}

std::vector<BatchUpdate> MuonUpdate::updates_of(core::BatchIndex index) const {
  const wire::OwnedBatch& batch = owned_.batches()[index];
  std::vector<BatchUpdate> updates;
  for (const Run& run : runs_[index]) {
    const auto part = [&](const std::string& name) { return batch.part(name, run.begin, run.end); };
    Piece piece{.weights = part(wire::kMaster),
                .gradient = part(wire::kGradient),
                .applies = applies_,
                .transposed = batch.view.transposed,
                .gradient_factor = owned_.gradient_factor()};
    if (batch.tensors.contains(kMemo)) piece.memo = part(kMemo);
    for (const State& state : run.group->rule->states()) piece.states.push_back(part(state.name));
    updates.emplace_back(*run.group, std::move(piece), batch.view.column_blocks, scalars_,
                         run.scalars);
  }
  return updates;
}

void MuonUpdate::prepare(core::BatchIndex batch) {
  updates_.at(batch) = updates_of(batch);
  for (BatchUpdate& update : updates_[batch]) update.prepare();
}

void MuonUpdate::orthogonalise(core::BatchIndex batch) {
  for (BatchUpdate& update : updates_.at(batch)) update.orthogonalise();
}

void MuonUpdate::apply(core::BatchIndex batch) {
  for (BatchUpdate& update : std::exchange(updates_.at(batch), {})) update.apply();
}

std::vector<std::string> add_states(engine::Engine& engine, const Rule& rule,
                                    std::int64_t memo_words) {
  std::vector<std::string> names;
  for (const State& state : rule.states()) {
    engine.owned().add(state.name,
                       [state](const layout::View& view) { return state.sizes_of(view); });
    names.push_back(state.name);
  }
  if (memo_words > 0 && engine.slices() == nullptr) {
    engine.owned().add(kMemo, [memo_words](const layout::View& view) {
      return std::vector<std::int64_t>{1, memo_words * view.column_blocks};
    });
  }
  return names;
}

void muon_step(engine::Engine& engine, const std::vector<MuonGroup>& groups,
               const core::Vector<core::ParameterIndex, int>& group_of, const at::Tensor& applies) {
  if (!std::ranges::all_of(groups, [](const auto& of) { return of.rule->takes_gradient_factor(); }))
    engine.owned().multiply_factor_in();
  if (engine.slices() == nullptr)
    return engine.step(std::make_shared<MuonUpdate>(engine.owned(), groups, group_of, applies));
  engine.step(std::make_shared<SliceUpdate>(engine.owned(), engine.sliced(), engine.slices(),
                                            groups, group_of, applies));
}

}  // namespace dmuon::optim
