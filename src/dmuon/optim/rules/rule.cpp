#include "dmuon/optim/rules/rule.h"

namespace dmuon::optim {

std::array<std::int64_t, 3> State::sizes_of_batch(std::int64_t matrices, std::int64_t rows,
                                                  std::int64_t cols,
                                                  std::int64_t column_blocks) const {
  const auto [state_rows, state_cols] = sizes(rows, cols / column_blocks);
  return {matrices, state_rows, state_cols * column_blocks};
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
