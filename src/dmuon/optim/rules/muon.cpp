#include "dmuon/optim/rules/muon.h"

#include <utility>

namespace dmuon::optim {
namespace {

// Places of scalars().
enum { kRest, kDecay, kFactor };

const float* on_device(const Piece& piece, int place) {
  return piece.scalars == nullptr ? nullptr : piece.scalars + place;
}

std::array<std::int64_t, 2> matrix_sizes(std::int64_t rows, std::int64_t cols, bool /*transposed*/) {
  return {rows, cols};
}

}  // namespace

const std::vector<State>& Muon::states() const {
  static const std::vector<State> kStates{{kMomentum, matrix_sizes}};
  return kStates;
}

std::vector<double> Muon::scalars(std::int64_t rows, std::int64_t cols, bool transposed) const {
  if (transposed) std::swap(rows, cols);
  return {1 - options_.momentum, 1 - options_.lr * options_.weight_decay,
          -adjust_lr(options_.adjust_lr, options_.lr, rows, cols)};
}

newton_schulz::MomentumStep Muon::step_of(const Piece& piece) const {
  return {.momentum = piece.states.front(),
          .gradient = piece.gradient,
          .mu = {options_.momentum, on_device(piece, kRest)},
          .nesterov = options_.nesterov,
          .applies = piece.applies,
          .memo = piece.memo,
          .gradient_factor = piece.gradient_factor};
}

newton_schulz::Start Muon::prepare(const newton_schulz::Elementwise& elementwise,
                                   const Piece& piece, at::ScalarType dtype, double eps) const {
  return elementwise.start(step_of(piece), dtype, eps);
}

void Muon::apply(const Piece& piece, const Orthogonalised& update) const {
  const at::Tensor& weights = piece.weights;
  const std::vector<double> numbers = scalars(weights.size(-2), weights.size(-1), piece.transposed);
  update.add_to_weights(piece, {numbers[kDecay], on_device(piece, kDecay)},
                        {numbers[kFactor], on_device(piece, kFactor)});
}

void Muon::move_weights(const Piece& piece, const newton_schulz::Elementwise& elementwise,
                        const at::Tensor& update) const {
  const at::Tensor& weights = piece.weights;
  const std::vector<double> numbers = scalars(weights.size(-2), weights.size(-1), piece.transposed);
  elementwise.move_weights({weights,
                            {numbers[kDecay], on_device(piece, kDecay)},
                            update,
                            {numbers[kFactor], on_device(piece, kFactor)},
                            piece.applies});
}

at::Tensor Muon::direction(const Piece& slices) const {
  return newton_schulz::elementwise_of(slices.weights.device()).move_momentum(step_of(slices));
}

void Muon::move(const Piece& slices, const at::Tensor& update, std::int64_t rows,
                std::int64_t cols) const {
  const std::vector<double> numbers = scalars(rows, cols, slices.transposed);
  newton_schulz::elementwise_of(slices.weights.device())
      .move_weights({slices.weights, numbers[kDecay], update, numbers[kFactor], slices.applies});
}

}  // namespace dmuon::optim
