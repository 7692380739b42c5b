#include "dmuon/optim/rules/recorded.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::optim {
namespace {

using at::Tensor;

enum { kRms, kSpectralNorm, kResidual, kCosine, kNumFigures };
constexpr int kIterations = 20;
constexpr double kTiny = 1e-30;

std::array<std::int64_t, 2> figures(std::int64_t /*rows*/, std::int64_t /*cols*/,
                                    bool /*transposed*/) {
  return {1, kNumFigures};
}

// [...] of [..., rows, cols].
Tensor norm_of(const Tensor& matrices) {
  return at::linalg_vector_norm(matrices, 2, at::IntArrayRef{-2, -1});
}

void put(const Piece& piece, int figure, const Tensor& value) {
  piece.states.back().select(-1, figure).select(-1, 0).copy_(value);
}

Piece without_figures(Piece piece) {
  piece.states.pop_back();
  return piece;
}

// The largest eigenvalue of [..., m, m], positive and symmetric. No matrix has the first vector, of
// uneven signs, among its directions of value 0 but by chance.
Tensor largest_eigenvalue(const Tensor& squares) {
  const std::int64_t side = squares.size(-1);
  Tensor vector = at::arange(1, side + 1, squares.options()).mul_(2.3).sin_().unsqueeze(-1);
  Tensor value;
  for (int i = 0; i < kIterations; ++i) {
    vector =
        squares.matmul(vector.div(norm_of(vector).clamp_min_(kTiny).unsqueeze(-1).unsqueeze(-1)));
    value = norm_of(vector);
  }
  return value;
}

}  // namespace

Recorded::Recorded(std::shared_ptr<const Rule> rule)
    : rule_(std::move(rule)), states_(rule_->states()) {
  states_.push_back({kUpdateStats, figures});
}

newton_schulz::Start Recorded::prepare(const newton_schulz::Elementwise& elementwise,
                                       const Piece& piece, at::ScalarType dtype, double eps) const {
  const Tensor& momentum = piece.states.front();
  const Tensor product = piece.gradient.mul(momentum).sum(at::IntArrayRef{-2, -1});
  const Tensor norms = norm_of(piece.gradient).mul_(norm_of(momentum));
  put(piece, kCosine, product.div(norms.clamp_min_(kTiny)));
  return rule_->prepare(elementwise, without_figures(piece), dtype, eps);
}

void Recorded::apply(const Piece& piece, const Orthogonalised& update) const {
  const Tensor before = piece.weights.clone();
  rule_->apply(without_figures(piece), update);
  const Tensor change = piece.weights.sub(before);
  const auto size = static_cast<double>(change.size(-2) * change.size(-1));
  put(piece, kRms, norm_of(change).div_(std::sqrt(size)));

  Tensor upright = update.computed(piece.weights.sizes()).to(at::kFloat);
  if (upright.size(-2) > upright.size(-1)) upright = upright.mT();
  const Tensor squares = upright.matmul(upright.mT());
  put(piece, kSpectralNorm, largest_eigenvalue(squares).sqrt_());
  squares.diagonal(0, -2, -1).sub_(1);
  put(piece, kResidual, norm_of(squares).div_(std::sqrt(static_cast<double>(squares.size(-1)))));
}

void begin_update_stats(engine::Engine& engine) {
  core::invariant(engine.slices() == nullptr, "begin_update_stats: the owner has slices");
  wire::Owned& owned = engine.owned();
  const State state{kUpdateStats, figures};
  if (!owned.has_name(kUpdateStats))
    owned.add(kUpdateStats, [state](const layout::View& view) { return state.sizes_of(view); });
  for (const wire::OwnedBatch& batch : owned.batches())
    batch.tensors.at(kUpdateStats).fill_(std::numeric_limits<double>::quiet_NaN());
}

}  // namespace dmuon::optim
