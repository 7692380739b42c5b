#include "dmuon/optim/batch_update.h"

#include <utility>

namespace dmuon::optim {
namespace {

// [b, rows, cols] -> [b, num_blocks, rows, cols / num_blocks], a view.
at::Tensor column_blocks_of(const at::Tensor& matrices, std::int64_t num_blocks) {
  return matrices.view({matrices.size(0), matrices.size(1), num_blocks, -1}).transpose(1, 2);
}

std::vector<Piece> pieces_of(const newton_schulz::Method& method, const Piece& batch) {
  std::vector<Piece> pieces;
  for (const at::Tensor& weights : method.pieces_of(batch.weights))
    pieces.push_back({.weights = weights,
                      .applies = batch.applies,
                      .transposed = batch.transposed,
                      .gradient_factor = batch.gradient_factor});
  const auto divide = [&](const at::Tensor& whole, const auto& give) {
    auto piece = pieces.begin();
    for (const at::Tensor& part : method.pieces_of(whole)) give(*piece++, part);
  };
  divide(batch.gradient, [](Piece& piece, const at::Tensor& part) { piece.gradient = part; });
  if (batch.memo.defined())
    divide(batch.memo, [](Piece& piece, const at::Tensor& part) { piece.memo = part; });
  for (const at::Tensor& state : batch.states)
    divide(state, [](Piece& piece, const at::Tensor& part) { piece.states.push_back(part); });
  return pieces;
}

}  // namespace

BatchUpdate::BatchUpdate(const MuonGroup& group, Piece batch, std::int64_t column_blocks,
                         std::shared_ptr<StepScalars> scalars, std::size_t place)
    : rule_(group.rule), scalars_(std::move(scalars)), place_(place) {
  if (column_blocks > 1) {
    for (at::Tensor* tensor : {&batch.weights, &batch.gradient, &batch.memo})
      if (tensor->defined()) *tensor = column_blocks_of(*tensor, column_blocks);
    for (at::Tensor& state : batch.states) state = column_blocks_of(state, column_blocks);
  }
  newton_schulz::IterationOptions options = group.iteration;
  constexpr const char* kFunction = "Muon.step";
  newton_schulz::check(options, kFunction);
  if (batch.weights.numel() == 0) return;
  const std::int64_t rows = batch.weights.size(-2);
  const std::int64_t cols = batch.weights.size(-1);
  const auto tuned = group.choices.find({rows, cols});
  if (tuned != group.choices.end()) options.choice = tuned->second;
  method_.emplace(
      newton_schulz::method_for(rows, cols, batch.weights.device(), options, kFunction));
  pieces_ = pieces_of(*method_, batch);
  if (scalars_ != nullptr) return;
  scalars_ = std::make_shared<StepScalars>();
  place_ = scalars_->add(rule_->scalars(rows, cols, batch.transposed));
}

void BatchUpdate::prepare() {
  starts_.reserve(pieces_.size());
  for (Piece& piece : pieces_) starts_.push_back(prepared(piece));
}

void BatchUpdate::orthogonalise() {
  orthogonalised_.reserve(starts_.size());
  for (newton_schulz::Start& start : std::exchange(starts_, {}))
    orthogonalised_.push_back(orthogonalised(std::move(start)));
}

void BatchUpdate::apply() {
  auto piece = pieces_.begin();
  for (Orthogonalised& one : std::exchange(orthogonalised_, {})) {
    const Orthogonalised update = std::move(one);  // freed when it is applied
    rule_->apply(*piece++, update);
  }
}

void BatchUpdate::run() {
  for (Piece& piece : pieces_) rule_->apply(piece, orthogonalised(prepared(piece)));
}

newton_schulz::Start BatchUpdate::prepared(Piece& piece) const {
  if (method_->elementwise.reads_scalars())
    piece.scalars = scalars_->on_device(place_, piece.weights.device());
  return rule_->prepare(method_->elementwise, piece, method_->dtype, method_->eps);
}

Orthogonalised BatchUpdate::orthogonalised(newton_schulz::Start start) const {
  return {&method_->products, &method_->elementwise,
          iterate(method_->products, std::move(start), method_->steps)};
}

}  // namespace dmuon::optim
