#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/engine/engine.h"
#include "dmuon/optim/rules/rule.h"

namespace dmuon::optim {

/// The name of the figures among owned tensors: fp32, four of each matrix.
inline const std::string kUpdateStats = "update stats";

/// Any rule that also records figures of each matrix's update, in this order. O is the
/// orthogonalised update, before the rule changes it, m the lesser of its sides:
///
/// - the RMS of the weights' change, decay included;
/// - an estimate of O's largest singular value, from below, by power iteration;
/// - the RMS of O's singular values squared, less 1: |O O' - I| / sqrt(m), with O upright;
/// - the cosine between the gradient and the momentum before it moves; 0 if one of both is 0.
///
/// Weights and states have the bits that they have without. Beside the rule's own work this takes
/// the last product again, one for O O', and copies of weights and O in fp32.
class Recorded final : public Rule {
 public:
  /// @param rule  its first state is the momentum.
  explicit Recorded(std::shared_ptr<const Rule> rule);

  const std::vector<State>& states() const override { return states_; }
  std::vector<double> scalars(std::int64_t rows, std::int64_t cols,
                              bool transposed) const override {
    return rule_->scalars(rows, cols, transposed);
  }
  /// Returns nothing: figures are computed by PyTorch's operators.
  std::optional<std::string> constants() const override { return std::nullopt; }
  bool takes_gradient_factor() const override { return rule_->takes_gradient_factor(); }
  newton_schulz::Start prepare(const newton_schulz::Elementwise& elementwise, const Piece& piece,
                               at::ScalarType dtype, double eps) const override;
  void apply(const Piece& piece, const Orthogonalised& update) const override;

 private:
  std::shared_ptr<const Rule> rule_;
  std::vector<State> states_;
};

/// Makes the figures NaN for all that this rank owns, before a step that records them. Adds them at
/// first. No step may be under way.
/// @throws InvalidArgument with tensor parallelism, where an owner has slices of weights.
void begin_update_stats(engine::Engine& engine);

}  // namespace dmuon::optim
