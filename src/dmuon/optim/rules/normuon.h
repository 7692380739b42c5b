#pragma once

#include <vector>

#include "dmuon/optim/rules/muon.h"

namespace dmuon::optim {

/// NorMuon (arXiv 2510.05491): Muon whose neurons move equally far, as a mean over steps has them.
/// A neuron is a row of an [out, in] matrix; of one stored transposed, a column. O is Muon's
/// orthogonalised update:
///
/// - v = v + (1 - beta2) (mean over the neuron of O O - v), one value a neuron
/// - N = O / (sqrt(v) + 1e-8)
/// - weights = (1 - lr weight_decay) weights - adjusted_lr |O| / |N| N, with Frobenius norms
///
/// This is the variant of microsoft/dion, which keeps the norm of each matrix's update. The paper
/// takes 0.2 lr sqrt(rows cols) / |N| N, which is the same with AdjustLr::kMatchRmsAdamw if all
/// singular values of O are 1. Neither corrects v's bias, which |O| / |N| cancels. The paper has no
/// nesterov; here it is the user's choice. NVIDIA-NeMo/Emerging-Optimizers takes means along the
/// longer side instead of the neuron.
class NorMuon final : public MuonRule {
 public:
  explicit NorMuon(const MuonOptions& options) : MuonRule(options) {}

  const std::vector<State>& states() const override;
  void apply(const Piece& piece, const Orthogonalised& update) const override;
};

}  // namespace dmuon::optim
