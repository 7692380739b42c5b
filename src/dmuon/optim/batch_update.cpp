#include "dmuon/optim/batch_update.h"

#include <utility>

namespace dmuon::optim {
namespace {

// [b, rows, cols] -> [b, num_blocks, rows, cols / num_blocks], a view.
at::Tensor column_blocks_of(const at::Tensor& matrices, std::int64_t num_blocks) {
  return matrices.view({matrices.size(0), matrices.size(1), num_blocks, -1}).transpose(1, 2);
}

// Changes each of the tensors of matrices.
template <typename Change>
void change_each(Piece& piece, const Change& change) {
  change(piece.weights);
  change(piece.gradient);
  for (at::Tensor& state : piece.states) change(state);
}

std::vector<Piece> pieces_of(const newton_schulz::Method& method, Piece batch) {
  const std::vector<at::Tensor> weights = method.pieces_of(batch.weights);
  const std::vector<at::Tensor> gradients = method.pieces_of(batch.gradient);
  std::vector<Piece> pieces;
  pieces.reserve(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i)
    pieces.push_back({weights[i], gradients[i], {}, batch.applies, batch.transposed});
  for (const at::Tensor& state : batch.states) {
    const std::vector<at::Tensor> states = method.pieces_of(state);
    for (std::size_t i = 0; i < pieces.size(); ++i) pieces[i].states.push_back(states[i]);
  }
  return pieces;
}

}  // namespace

BatchUpdate::BatchUpdate(const MuonGroup& group, Piece batch, std::int64_t column_blocks)
    : rule_(group.rule) {
  if (column_blocks > 1) {
    change_each(batch,
                [&](at::Tensor& tensor) { tensor = column_blocks_of(tensor, column_blocks); });
  }
  newton_schulz::IterationOptions options = group.iteration;
  newton_schulz::check(options);
  if (batch.weights.numel() == 0) return;
  const std::int64_t rows = batch.weights.size(-2);
  const std::int64_t cols = batch.weights.size(-1);
  const auto tuned = group.choices.find({rows, cols});
  if (tuned != group.choices.end()) options.choice = tuned->second;
  method_.emplace(newton_schulz::method_for(rows, cols, batch.weights.device(), options));
  pieces_ = pieces_of(*method_, std::move(batch));
}

void BatchUpdate::prepare() {
  starts_.reserve(pieces_.size());
  for (const Piece& piece : pieces_)
    starts_.push_back(rule_->prepare(piece, method_->dtype, method_->eps));
}

void BatchUpdate::orthogonalise() {
  orthogonalised_.reserve(starts_.size());
  for (newton_schulz::Start& start : std::exchange(starts_, {})) {
    orthogonalised_.push_back(
        {&method_->products,
         newton_schulz::iterate(method_->products, std::move(start), method_->steps)});
  }
}

void BatchUpdate::apply() {
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const Orthogonalised update = std::move(orthogonalised_[i]);
    rule_->apply(pieces_[i], update);
  }
  orthogonalised_.clear();
}

}  // namespace dmuon::optim
