#include "dmuon/optim/batch_update.h"

#include <utility>

#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::optim {
namespace {

// [b, rows, cols] -> [b, num_blocks, rows, cols / num_blocks], a view.
at::Tensor column_blocks_of(const at::Tensor& matrices, std::int64_t num_blocks) {
  return matrices.view({matrices.size(0), matrices.size(1), num_blocks, -1}).transpose(1, 2);
}

// [b, rows, ...] -> [b, groups, height, ...], or [b, height, ...] of one group: views.
at::Tensor rows_of(const at::Tensor& matrices, std::int64_t num_groups, layout::RowPart part) {
  const at::Tensor rows = matrices.view({matrices.size(0), num_groups, -1, matrices.size(2)})
                              .narrow(2, part.first, part.height);
  return num_groups == 1 ? rows.squeeze(1) : rows;
}

// A part's memos follow each other, because kernels want them contiguous.
at::Tensor memo_of(const at::Tensor& memo, const layout::View& view, std::size_t part) {
  const auto num_parts = static_cast<std::int64_t>(view.row_parts().size());
  return memo.view({num_parts, memo.size(0), 1, -1}).select(0, static_cast<std::int64_t>(part));
}

// Interleaved rows of a piece, [..., groups, height, n], as matrices of their own.
class Gathered {
 public:
  explicit Gathered(const at::Tensor& rows) : rows_(rows), matrix_(rows.flatten(-3, -2)) {}
  const at::Tensor& matrix() const { return matrix_; }
  void put_back() const {
    if (matrix_.is_alias_of(rows_)) return;  // one row a group
    rows_.copy_(matrix_.view(rows_.sizes()));
  }

 private:
  at::Tensor rows_;
  at::Tensor matrix_;
};

std::vector<Piece> pieces_of(const newton_schulz::Method& method, const Piece& batch,
                             bool interleaved) {
  const std::int64_t matrix_dims = interleaved ? 3 : 2;
  std::vector<Piece> pieces;
  for (const at::Tensor& weights : method.pieces_of(batch.weights, matrix_dims))
    pieces.push_back({.weights = weights,
                      .applies = batch.applies,
                      .transposed = batch.transposed,
                      .gradient_factor = batch.gradient_factor});
  const auto divide = [&](const at::Tensor& whole, std::int64_t dims, const auto& give) {
    auto piece = pieces.begin();
    for (const at::Tensor& part : method.pieces_of(whole, dims)) give(*piece++, part);
  };
  divide(batch.gradient, matrix_dims,
         [](Piece& piece, const at::Tensor& part) { piece.gradient = part; });
  if (batch.memo.defined())
    divide(batch.memo, 2, [](Piece& piece, const at::Tensor& part) { piece.memo = part; });
  for (const at::Tensor& state : batch.states) {
    divide(state, matrix_dims,
           [](Piece& piece, const at::Tensor& part) { piece.states.push_back(part); });
  }
  return pieces;
}

}  // namespace

newton_schulz::IterationOptions MuonGroup::iteration_of(std::int64_t rows,
                                                        std::int64_t cols) const {
  newton_schulz::IterationOptions options = iteration;
  const auto tuned = choices.find({rows, cols});
  if (tuned != choices.end()) options.choice = tuned->second;
  return options;
}

Piece stored_piece(const wire::OwnedBatch& batch, std::size_t begin, std::size_t end,
                   const Rule& rule) {
  const auto part = [&](const std::string& name) { return batch.part(name, begin, end); };
  Piece piece{.weights = part(wire::kMaster),
              .gradient = part(wire::kGradient),
              .transposed = batch.view.transposed};
  for (const State& state : rule.states()) piece.states.push_back(part(state.name));
  return piece;
}

Piece part_of(const Piece& stored, const layout::View& view, std::size_t part) {
  if (view.heights.empty()) return stored;
  Piece piece = stored;
  const layout::RowPart rows = view.row_parts().at(part);
  for (at::Tensor* tensor : {&piece.weights, &piece.gradient})
    *tensor = rows_of(*tensor, view.num_groups(), rows);
  for (at::Tensor& state : piece.states) state = rows_of(state, view.num_groups(), rows);
  if (piece.memo.defined()) piece.memo = memo_of(piece.memo, view, part);
  return piece;
}

BatchUpdate::BatchUpdate(const MuonGroup& group, Piece batch, std::int64_t column_blocks,
                         std::shared_ptr<StepScalars> scalars, std::size_t place)
    : rule_(group.rule),
      interleaved_(column_blocks == 1 && batch.weights.dim() == 4),
      scalars_(std::move(scalars)),
      place_(place) {
  if (column_blocks > 1) {
    for (at::Tensor* tensor : {&batch.weights, &batch.gradient, &batch.memo})
      if (tensor->defined()) *tensor = column_blocks_of(*tensor, column_blocks);
    for (at::Tensor& state : batch.states) state = column_blocks_of(state, column_blocks);
  }
  constexpr const char* kFunction = "Muon.step";
  newton_schulz::check(group.iteration, kFunction);
  if (batch.weights.numel() == 0) return;
  const std::int64_t rows = batch.weights.size(-2) * (interleaved_ ? batch.weights.size(-3) : 1);
  const std::int64_t cols = batch.weights.size(-1);
  method_.emplace(newton_schulz::method_for(rows, cols, batch.weights.device(),
                                            group.iteration_of(rows, cols), kFunction));
  pieces_ = pieces_of(*method_, batch, interleaved_);
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
    applied(*piece++, update);
  }
}

void BatchUpdate::run() {
  for (Piece& piece : pieces_) applied(piece, orthogonalised(prepared(piece)));
}

newton_schulz::Start BatchUpdate::prepared(Piece& piece) const {
  if (method_->elementwise.reads_scalars())
    piece.scalars = scalars_->on_device(place_, piece.weights.device());
  const auto prepare = [&](const Piece& one) {
    return rule_->prepare(method_->elementwise, one, method_->dtype, method_->eps);
  };
  if (!interleaved_) return prepare(piece);
  newton_schulz::uses_pytorch("gathers interleaved rows");
  const Gathered gradient(piece.gradient);
  const Gathered first(piece.states.front());
  Piece matrices = piece;
  matrices.weights = at::Tensor();
  matrices.gradient = gradient.matrix();
  matrices.states = {first.matrix()};
  newton_schulz::Start start = prepare(matrices);
  first.put_back();
  return start;
}

void BatchUpdate::applied(const Piece& piece, const Orthogonalised& update) const {
  if (!interleaved_) return rule_->apply(piece, update);
  const Gathered weights(piece.weights);
  std::vector<Gathered> others;
  for (auto state = piece.states.begin() + 1; state != piece.states.end(); ++state)
    others.emplace_back(*state);
  Piece matrices = piece;
  matrices.weights = weights.matrix();
  matrices.gradient = at::Tensor();
  matrices.states = std::vector<at::Tensor>(1);
  for (const Gathered& other : others) matrices.states.push_back(other.matrix());
  rule_->apply(matrices, update);
  weights.put_back();
  for (const Gathered& other : others) other.put_back();
}

Orthogonalised BatchUpdate::orthogonalised(newton_schulz::Start start) const {
  return {&method_->products, &method_->elementwise,
          iterate(method_->products, std::move(start), method_->steps)};
}

}  // namespace dmuon::optim
