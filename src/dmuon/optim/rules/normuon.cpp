#include "dmuon/optim/rules/normuon.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/where.h>

namespace dmuon::optim {
namespace {

using at::Tensor;

std::array<std::int64_t, 2> a_value_a_neuron(std::int64_t rows, std::int64_t cols,
                                             bool transposed) {
  if (transposed) return {1, cols};
  return {rows, 1};
}

Tensor sum_of_matrix(const Tensor& values) {
  return values.sum(at::IntArrayRef{-2, -1}, /*keepdim=*/true);
}

}  // namespace

const std::vector<State>& NorMuon::states() const {
  static const std::vector<State> kStates{MuonRule::states().front(),
                                          {kSecondMomentum, a_value_a_neuron}};
  return kStates;
}

// Norms of O and N follow from the neurons' sums of squares, so the update is read once, and
// multiplied once.
void NorMuon::apply(const Piece& piece, const Orthogonalised& update) const {
  const Tensor whole = update.computed(piece.weights.sizes());
  const std::int64_t along = piece.transposed ? -2 : -1;
  const at::ScalarType wide = c10::promoteTypes(whole.scalar_type(), at::kFloat);
  const Tensor squares =
      at::linalg_vector_norm(whole, 2, at::IntArrayRef{along}, /*keepdim=*/true, wide)
          .square_()
          .to(at::kFloat);
  const Tensor& moment = piece.states[1];
  const Tensor mean = squares.div(whole.size(along));
  // If the step does not apply, the moment moves towards itself.
  moment.lerp_(at::where(piece.applies, mean, moment), 1 - options().beta2);
  const Tensor factors = moment.sqrt().add_(kSecondMomentumEps).reciprocal_();
  const Tensor of_n = sum_of_matrix(squares.mul(factors.square()))
                          .clamp_min_(kSecondMomentumEps * kSecondMomentumEps);
  factors.mul_(sum_of_matrix(squares).div_(of_n).sqrt_());
  move_weights(piece, *update.elementwise, whole.mul(factors));
}

}  // namespace dmuon::optim
