#include "dmuon/optim/rules/adamuon.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>

namespace dmuon::optim {
namespace {

using at::Tensor;

std::array<std::int64_t, 2> a_value_an_element(std::int64_t rows, std::int64_t cols,
                                               bool /*transposed*/) {
  return {rows, cols};
}

// [..., 1, 1]. First by row: a reduction of a whole matrix has other bits alone than in a batch.
Tensor norm_of_matrix(const Tensor& x) {
  constexpr bool kKeepDim = true;
  const Tensor by_row = at::linalg_vector_norm(x, 2, at::IntArrayRef{-1}, kKeepDim);
  return at::linalg_vector_norm(by_row, 2, at::IntArrayRef{-2}, kKeepDim);
}

}  // namespace

const std::vector<State>& AdaMuon::states() const {
  static const std::vector<State> kStates{MuonRule::states().front(),
                                          {kSecondMomentum, a_value_an_element}};
  return kStates;
}

newton_schulz::Start AdaMuon::prepare(const newton_schulz::Elementwise& elementwise,
                                      const Piece& piece, at::ScalarType dtype, double eps) const {
  const Tensor direction = elementwise.move_momentum(step_of(piece));
  // The sign of a NaN is 0. Added, a NaN stays one, as in Muon.
  return elementwise.start_of(direction.sign().add_(direction, 0), dtype, eps);
}

void AdaMuon::apply(const Piece& piece, const Orthogonalised& orthogonalised) const {
  const Tensor update = orthogonalised.computed(piece.weights.sizes()).to(at::kFloat);
  const Tensor& moment = piece.states[1];
  Tensor other = update.square();
  // If the step does not apply, the moment moves towards itself.
  at::where_out(other, piece.applies, other, moment);
  moment.lerp_(other, 1 - options().beta2);
  update.div_(at::sqrt_out(other, moment).add_(kSecondMomentumEps));
  const std::int64_t side = std::min(update.size(-2), update.size(-1));
  update.mul_(norm_of_matrix(update)
                  .add_(kSecondMomentumEps)
                  .reciprocal_()
                  .mul_(std::sqrt(static_cast<double>(side))));
  move_weights(piece, *orthogonalised.elementwise, update);
}

}  // namespace dmuon::optim
