#include "dmuon/optim/muon_step.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "dmuon/newton_schulz/orthogonalize.h"

namespace dmuon::optim {
namespace {

// [b, rows, cols] -> [b, num_blocks, rows, cols / num_blocks], of the same memory.
at::Tensor column_blocks_of(const at::Tensor& matrices, std::int64_t num_blocks) {
  return matrices.view({matrices.size(0), matrices.size(1), num_blocks, -1}).transpose(1, 2);
}

double adjusted_lr(const MuonGroup& group, std::int64_t rows, std::int64_t cols, bool transposed) {
  if (transposed) std::swap(rows, cols);
  return adjust_lr(group.adjust_lr, group.lr, rows, cols);
}

void update(const wire::OwnedBatch& batch, const std::vector<MuonGroup>& groups,
            const core::Vector<core::ParameterIndex, int>& group_of, const at::Tensor& applies) {
  const c10::AutoGradMode no_grad(false);
  const std::size_t size = batch.parameters.size();
  const auto group = [&](std::size_t index) { return group_of.at(batch.parameters[index]); };
  // Neighbours of one group go together; mostly that is the whole batch.
  std::size_t end = 0;
  for (std::size_t begin = 0; begin < size; begin = end) {
    end = begin + 1;
    while (end < size && group(end) == group(begin)) ++end;
    if (group(begin) < 0) continue;
    muon_update(batch.part(wire::kMaster, begin, end), batch.part(kMomentum, begin, end),
                batch.part(wire::kGradient, begin, end),
                groups.at(static_cast<std::size_t>(group(begin))), applies,
                batch.view.column_blocks, batch.view.transposed);
  }
}

}  // namespace

void muon_update(at::Tensor master, at::Tensor momentum, at::Tensor gradient,
                 const MuonGroup& group, const at::Tensor& applies, std::int64_t column_blocks,
                 bool transposed) {
  if (column_blocks > 1) {
    for (at::Tensor* tensor : {&master, &momentum, &gradient})
      *tensor = column_blocks_of(*tensor, column_blocks);
  }
  newton_schulz::IterationOptions options;
  options.coefficients = group.coefficients;
  options.eps = group.eps;
  options.dtype = group.ns_dtype;
  const auto tuned = group.choices.find({master.size(-2), master.size(-1)});
  if (tuned != group.choices.end()) options.choice = tuned->second;
  const double lr = adjusted_lr(group, master.size(-2), master.size(-1), transposed);
  newton_schulz::update({.master = std::move(master),
                         .momentum = std::move(momentum),
                         .gradient = std::move(gradient),
                         .mu = group.momentum,
                         .nesterov = group.nesterov,
                         .decay = 1 - group.lr * group.weight_decay,
                         .lr = lr,
                         .applies = applies},
                        options);
}

void add_momentum(engine::Engine& engine) { engine.owned().add(kMomentum); }

namespace {

class MuonUpdate final : public engine::Update {
 public:
  MuonUpdate(const wire::Owned& owned, std::vector<MuonGroup> groups,
             core::Vector<core::ParameterIndex, int> group_of, at::Tensor applies)
      : owned_(owned),
        groups_(std::move(groups)),
        group_of_(std::move(group_of)),
        applies_(std::move(applies)) {}

  void prepare(core::BatchIndex) override {}
  void orthogonalise(core::BatchIndex) override {}
  void apply(core::BatchIndex batch) override {
    update(owned_.batches()[batch], groups_, group_of_, applies_);
  }

 private:
  const wire::Owned& owned_;
  std::vector<MuonGroup> groups_;
  core::Vector<core::ParameterIndex, int> group_of_;
  at::Tensor applies_;
};

}  // namespace

void muon_step(engine::Engine& engine, const std::vector<MuonGroup>& groups,
               const core::Vector<core::ParameterIndex, int>& group_of, const at::Tensor& applies) {
  engine.step(std::make_shared<MuonUpdate>(engine.owned(), groups, group_of, applies));
}

}  // namespace dmuon::optim
