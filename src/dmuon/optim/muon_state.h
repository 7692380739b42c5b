#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "dmuon/engine/engine.h"
#include "dmuon/newton_schulz/coefficients.h"
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
};

/// One Muon update, in place, of a batch of equally shaped matrices (torch.optim.Muon's semantics;
/// the paper, eq. muon-update):
///
///   momentum += (1 - mu) (gradient - momentum);  u = nesterov ? gradient + mu (momentum -
///   gradient) : momentum master   <- (1 - lr weight_decay) master - adjusted_lr NewtonSchulz(u)
///
/// @param master, momentum  [b, rows, cols] fp32, changed in place.
/// @param gradient          [b, rows, cols] fp32, unchanged.
void muon_update(at::Tensor master, at::Tensor momentum, const at::Tensor& gradient,
                 const MuonGroup& group);

/// Muon's state beside an engine's owned matrices: a momentum for each, at its owner alone.
/// Not thread-safe; works on the current stream.
class MuonState {
 public:
  explicit MuonState(std::shared_ptr<engine::Engine> engine);

  /// Updates what this rank owns and publishes it (Engine::step). Every rank calls it, with equal
  /// arguments.
  /// @param groups        by group index.
  /// @param group_of      [matrices] group index; -1 leaves the matrix alone.
  void step(const std::vector<MuonGroup>& groups, const std::vector<int>& group_of);

  /// Multiplies the gradients of what this rank owns.
  void scale_gradients(double factor);

  /// [rows, cols] fp32 views of this rank's state of a matrix; undefined tensors at other ranks.
  at::Tensor momentum(int matrix) const;
  at::Tensor master(int matrix) const;
  at::Tensor gradient(int matrix) const;

 private:
  void update(std::size_t batch, const std::vector<MuonGroup>& groups,
              const std::vector<int>& group_of);

  std::shared_ptr<engine::Engine> engine_;
  std::vector<at::Tensor> momenta_;  // [batches] [b, rows, cols] fp32
};

}  // namespace dmuon::optim
