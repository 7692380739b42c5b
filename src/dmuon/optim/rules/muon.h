#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dmuon/optim/adjust_lr.h"
#include "dmuon/optim/rules/rule.h"

namespace dmuon::optim {

struct MuonOptions {
  double lr;
  double weight_decay;
  double momentum;
  bool nesterov;
  AdjustLr adjust_lr;
  double beta2 = 0;                    ///< of rules with a second moment
  bool cautious_weight_decay = false;  ///< see Muon
};

/// torch.optim.Muon's name of the only state.
inline const std::string kMomentum = "momentum_buffer";
/// The name of a second moment, which rules that change the update store.
inline const std::string kSecondMomentum = "second_momentum_buffer";
/// What such rules add to its root, and the least norm by which they scale.
inline constexpr double kSecondMomentumEps = 1e-8;

/// Muon and the rules that change its orthogonalised update O share these equations (the paper, eq.
/// muon-update):
///
/// - momentum += (1 - mu) (gradient - momentum)
/// - u = gradient + mu (momentum - gradient) with nesterov, else momentum
/// - weights = (1 - lr weight_decay) weights - adjusted_lr O
///
/// With cautious weight decay (arXiv 2510.12402) an element decays only if its weight has the sign
/// of its update, which is subtracted, or one of both is 0. So no element decays that the update
/// moves away from 0.
///
/// `adjusted_lr` depends on the shape of the matrix; a transposed one has columns for rows. If a
/// gradient has a NaN or an infinity, its momentum has it too, and all its weights become NaN.
class MuonRule : public Rule {
 public:
  explicit MuonRule(const MuonOptions& options) : options_(options) {}

  const std::vector<State>& states() const override;
  bool takes_gradient_factor() const override { return true; }
  /// Returns 1 - mu, the factor of the weights, and the factor of the update.
  std::vector<double> scalars(std::int64_t rows, std::int64_t cols, bool transposed) const override;
  newton_schulz::Start prepare(const newton_schulz::Elementwise& elementwise, const Piece& piece,
                               at::ScalarType dtype, double eps) const override;

 protected:
  const MuonOptions& options() const { return options_; }
  newton_schulz::MomentumStep step_of(const Piece& piece) const;
  /// weights <- decay weights - adjusted_lr update
  /// @param update      of the weights' sizes, any dtype.
  /// @param rows, cols  of a whole matrix.
  void move_weights(const Piece& piece, const newton_schulz::Elementwise& elementwise,
                    const at::Tensor& update, std::int64_t rows, std::int64_t cols) const;
  void move_weights(const Piece& piece, const newton_schulz::Elementwise& elementwise,
                    const at::Tensor& update) const {
    move_weights(piece, elementwise, update, piece.weights.size(-2), piece.weights.size(-1));
  }

 private:
  MuonOptions options_;
};

/// Muon, with torch.optim.Muon's semantics: O = NewtonSchulz(u).
class Muon final : public MuonRule {
 public:
  explicit Muon(const MuonOptions& options) : MuonRule(options) {}

  /// Returns nothing with cautious weight decay, which PyTorch's operators compute.
  std::optional<std::string> constants() const override {
    if (options().cautious_weight_decay) return std::nullopt;
    return options().nesterov ? "muon, nesterov" : "muon";
  }
  void apply(const Piece& piece, const Orthogonalised& update) const override;
  at::Tensor direction(const Piece& slices) const override;
  void move(const Piece& slices, const at::Tensor& update, std::int64_t rows,
            std::int64_t cols) const override;
};

}  // namespace dmuon::optim
