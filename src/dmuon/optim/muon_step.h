#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "dmuon/engine/engine.h"
#include "dmuon/newton_schulz/coefficients.h"
#include "dmuon/newton_schulz/orthogonalize.h"
#include "dmuon/optim/adjust_lr.h"

namespace dmuon::optim {

/// The hyperparameters of one parameter group, as they are at this step.
struct MuonGroup {
  double lr;
  double weight_decay;
  double momentum;
  bool nesterov;
  newton_schulz::Coefficients coefficients;
  double eps;
  AdjustLr adjust_lr;
  at::ScalarType ns_dtype;
  newton_schulz::Choices choices = {};  ///< of the shapes that were tuned
};

/// One Muon update, in place, of a batch of equally shaped matrices (torch.optim.Muon's semantics;
/// the paper, eq. muon-update):
///
/// - momentum += (1 - mu) (gradient - momentum)
/// - u = gradient + mu (momentum - gradient) with nesterov, else momentum
/// - master = (1 - lr weight_decay) master - adjusted_lr NewtonSchulz(u)
///
/// Where it does not apply, master and momentum keep their values, whatever the gradient holds (a
/// zero may change its sign); nobody waits for the device to know.
///
/// @param master, momentum  [b, rows, cols] fp32, contiguous, changed in place.
/// @param gradient          [b, rows, cols] fp32, contiguous, unchanged.
/// @param applies           [] bool, of the same device.
/// @param column_blocks     divides cols: so many equal blocks of columns of each matrix are
///                          orthogonalised apart, and have the learning rate of theirs.
/// @param transposed        the learning rate takes columns for rows, and rows for columns.
void muon_update(at::Tensor master, at::Tensor momentum, at::Tensor gradient,
                 const MuonGroup& group, const at::Tensor& applies, std::int64_t column_blocks = 1,
                 bool transposed = false);

/// What an owner holds for Muon beside master and gradient; torch.optim.Muon's name.
inline const std::string kMomentum = "momentum_buffer";

/// Each parameter gets a momentum of zeros, at its owner alone. Once an engine, before its first
/// step. Neither this nor muon_step may run beside other calls of the engine.
void add_momentum(engine::Engine& engine);

/// Updates what this rank owns and publishes it (Engine::step). Every rank calls it, with equal
/// arguments. Works on the current stream.
/// @param groups        by group index.
/// @param group_of      group index; -1 leaves the parameter alone.
/// @param applies       [] bool, on the engine's device: false leaves everything as it is.
void muon_step(engine::Engine& engine, const std::vector<MuonGroup>& groups,
               const core::Vector<core::ParameterIndex, int>& group_of, const at::Tensor& applies);

}  // namespace dmuon::optim
