#include "dmuon/optim/rules/rule.h"

namespace dmuon::optim {

std::vector<std::int64_t> State::sizes_of(const layout::View& view) const {
  const auto [state_rows, state_cols] = sizes(view.rows, view.cols / view.column_blocks);
  return {state_rows, state_cols * view.column_blocks};
}

void Orthogonalised::add_to_weights(const Piece& piece, double decay, double factor) const {
  const at::Tensor& weights = piece.weights;
  if (products->add_to_weights(weights, decay, factor, pending, piece.applies)) return;
  newton_schulz::elementwise_of(weights.device())
      .move_weights(weights, decay, computed(weights.sizes()), factor, piece.applies);
}

at::Tensor Orthogonalised::computed(at::IntArrayRef sizes) const {
  const std::int64_t rows = sizes[sizes.size() - 2];
  const std::int64_t cols = sizes[sizes.size() - 1];
  const at::Tensor padded = newton_schulz::computed(*products, pending);
  return padded.narrow(-2, 0, rows).narrow(-1, 0, cols).view(sizes);
}

}  // namespace dmuon::optim
