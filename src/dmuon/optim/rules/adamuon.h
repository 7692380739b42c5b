#pragma once

#include <vector>

#include "dmuon/optim/rules/muon.h"

namespace dmuon::optim {

/// AdaMuon (arXiv 2507.11005): Muon of the direction's signs, divided by a second moment of each
/// element. u is Muon's direction:
///
/// - O = NewtonSchulz(sign(u))
/// - v = v + (1 - beta2) (O O - v), element by element
/// - A = O / (sqrt(v) + 1e-8)
/// - weights = (1 - lr weight_decay) weights
///             - adjusted_lr sqrt(min(rows, cols)) / (|A| + 1e-8) A, with the Frobenius norm
///
/// This is the published algorithm, with the sign before the iteration as in the paper and in
/// Chongjie-Si/AdaMuon. It moves a matrix by lr 0.2 sqrt(rows cols), which is ours with
/// AdjustLr::kMatchRmsAdamw; with others the update has the norm that Muon's has if all its
/// singular values are 1. It takes momentum's factor for beta2, whose default here is momentum's.
/// It does not correct v's bias, which |A| cancels. NVIDIA-NeMo/Emerging-Optimizers has neither
/// sign nor norm.
class AdaMuon final : public MuonRule {
 public:
  explicit AdaMuon(const MuonOptions& options) : MuonRule(options) {}

  const std::vector<State>& states() const override;
  newton_schulz::Start prepare(const newton_schulz::Elementwise& elementwise, const Piece& piece,
                               at::ScalarType dtype, double eps) const override;
  void apply(const Piece& piece, const Orthogonalised& update) const override;
};

}  // namespace dmuon::optim
