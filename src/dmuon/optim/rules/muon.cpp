#include "dmuon/optim/rules/muon.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <utility>

namespace dmuon::optim {
namespace {

// Places of scalars().
enum { kRest, kDecay, kFactor };

const float* on_device(const Piece& piece, int place) {
  return piece.scalars == nullptr ? nullptr : piece.scalars + place;
}

std::array<std::int64_t, 2> matrix_sizes(std::int64_t rows, std::int64_t cols,
                                         bool /*transposed*/) {
  return {rows, cols};
}

// weights <- weights - rate weights, but for elements whose update has the other sign.
void decay_where_signs_agree(const Piece& piece, const at::Tensor& update, double rate) {
  const at::Tensor& weights = piece.weights;
  const auto scalar = [&](double x) { return at::scalar_tensor(x, weights.options()); };
  const at::Tensor agreeing = weights.mul(update).ge_(0).to(at::kFloat).mul_(weights);
  weights.addcmul_(agreeing, at::where(piece.applies, scalar(-rate), scalar(0)));
}

}  // namespace

const std::vector<State>& MuonRule::states() const {
  static const std::vector<State> kStates{{kMomentum, matrix_sizes}};
  return kStates;
}

std::vector<double> MuonRule::scalars(std::int64_t rows, std::int64_t cols, bool transposed) const {
  if (transposed) std::swap(rows, cols);
  return {1 - options_.momentum, 1 - options_.lr * options_.weight_decay,
          -adjust_lr(options_.adjust_lr, options_.lr, rows, cols)};
}

newton_schulz::MomentumStep MuonRule::step_of(const Piece& piece) const {
  return {.momentum = piece.states.front(),
          .gradient = piece.gradient,
          .mu = {options_.momentum, on_device(piece, kRest)},
          .nesterov = options_.nesterov,
          .applies = piece.applies,
          .memo = piece.memo,
          .gradient_factor = piece.gradient_factor};
}

newton_schulz::Start MuonRule::prepare(const newton_schulz::Elementwise& elementwise,
                                       const Piece& piece, at::ScalarType dtype, double eps) const {
  return elementwise.start(step_of(piece), dtype, eps);
}

void Muon::apply(const Piece& piece, const Orthogonalised& update) const {
  const at::Tensor& weights = piece.weights;
  if (options().cautious_weight_decay)
    return move_weights(piece, *update.elementwise, update.computed(weights.sizes()));
  const std::vector<double> numbers = scalars(weights.size(-2), weights.size(-1), piece.transposed);
  update.add_to_weights(piece, {numbers[kDecay], on_device(piece, kDecay)},
                        {numbers[kFactor], on_device(piece, kFactor)});
}

void MuonRule::move_weights(const Piece& piece, const newton_schulz::Elementwise& elementwise,
                            const at::Tensor& update, std::int64_t rows, std::int64_t cols) const {
  const std::vector<double> numbers = scalars(rows, cols, piece.transposed);
  const newton_schulz::Scalar factor{numbers[kFactor], on_device(piece, kFactor)};
  newton_schulz::Scalar decay{numbers[kDecay], on_device(piece, kDecay)};
  if (options_.cautious_weight_decay) {
    decay_where_signs_agree(piece, update, options_.lr * options_.weight_decay);
    decay = 1;
  }
  elementwise.move_weights({piece.weights, decay, update, factor, piece.applies});
}

at::Tensor Muon::direction(const Piece& slices) const {
  return newton_schulz::elementwise_of(slices.weights.device()).move_momentum(step_of(slices));
}

void Muon::move(const Piece& slices, const at::Tensor& update, std::int64_t rows,
                std::int64_t cols) const {
  move_weights(slices, newton_schulz::elementwise_of(slices.weights.device()), update, rows, cols);
}

}  // namespace dmuon::optim
