#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "dmuon/optim/batch_update.h"
#include "dmuon/optim/muon_step.h"
#include "dmuon/optim/muon_update.h"
#include "dmuon/optim/rules/make_rule.h"
#include "dmuon/optim/rules/muon.h"
#include "tests/optim/plain_muon.h"

namespace dmuon::optim {

inline const newton_schulz::Coefficients kCoefficients{
    {3.4445, -4.775, 2.0315}, {4, -6.9, 3.2}, {1.9, -1.3, 0.4}};

inline const at::Tensor kApplies = at::scalar_tensor(true, at::kBool);

inline MuonOptions muon(double lr) { return {lr, 0.1, 0.9, true, AdjustLr::kOriginal}; }

// In fp32.
inline MuonGroup group_of(const MuonOptions& options) {
  MuonGroup group{std::make_shared<Muon>(options), {}};
  group.iteration.coefficients = kCoefficients;
  return group;
}

// The same by another rule.
inline MuonGroup group_of(const std::string& rule, const MuonOptions& options) {
  MuonGroup group = group_of(options);
  group.rule = make_rule(rule, options);
  return group;
}

// Options for rules with a second moment.
inline MuonOptions with_second_moment() {
  MuonOptions options = muon(0.05);
  options.beta2 = 0.8;
  return options;
}

// A rule that knows of no factor of gradients: what one value a row remembers, and weights that
// move by the update over that.
class Rows final : public Rule {
 public:
  const std::vector<State>& states() const override {
    static const std::vector<State> kStates{{"rows", [](std::int64_t rows, std::int64_t, bool) {
                                               return std::array{rows, std::int64_t{1}};
                                             }}};
    return kStates;
  }
  newton_schulz::Start prepare(const newton_schulz::Elementwise& elementwise, const Piece& piece,
                               at::ScalarType dtype, double eps) const override {
    at::Tensor x = piece.gradient.reshape({-1, piece.gradient.size(-2), piece.gradient.size(-1)});
    x = elementwise.normalise(x, dtype, eps);
    return {piece.gradient.dim() == 2 ? x.squeeze(0) : x};
  }
  void apply(const Piece& piece, const Orthogonalised& update) const override {
    at::Tensor moved = update.computed(piece.weights.sizes());
    at::Tensor rows = piece.states.front();
    rows.add_(moved.square().sum(-1, /*keepdim=*/true));
    moved = moved.div(rows);
    update.elementwise->move_weights({piece.weights, 1, moved, -1, piece.applies});
  }
};

inline std::vector<MuonGroup> groups_of(const std::vector<MuonOptions>& all) {
  std::vector<MuonGroup> groups;
  for (const MuonOptions& options : all) groups.push_back(group_of(options));
  return groups;
}

inline at::Tensor random_tensor(std::vector<std::int64_t> sizes, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  at::Tensor tensor = at::empty(sizes, at::TensorOptions().dtype(at::kFloat));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.mutable_data_ptr<float>()[i] = normal(random);
  }
  return tensor;
}

// A rule's states of a batch [b, rows, cols], zeros.
inline std::vector<at::Tensor> states_for(const Rule& rule, const at::Tensor& master,
                                          std::int64_t column_blocks = 1, bool transposed = false) {
  std::vector<at::Tensor> states;
  for (const State& state : rule.states()) {
    std::vector<std::int64_t> sizes =
        state.sizes_of({master.size(0), master.size(1), master.size(2), column_blocks, transposed});
    sizes.insert(sizes.begin(), master.size(0));
    states.push_back(at::zeros(sizes));
  }
  return states;
}

// muon_update with all of a rule's states, the momentum first.
inline void update_with(const MuonGroup& group, const at::Tensor& master,
                        const at::Tensor& gradient, const std::vector<at::Tensor>& states,
                        std::int64_t column_blocks = 1, bool transposed = false,
                        const at::Tensor& applies = kApplies) {
  muon_update(master, states.front(), gradient, group, applies, column_blocks, transposed, {},
              {states.begin() + 1, states.end()});
}

inline Plain plain_of(const at::Tensor& matrix) {
  const at::Tensor whole = matrix.contiguous();
  const auto* data = whole.const_data_ptr<float>();
  return {static_cast<std::size_t>(whole.size(0)), static_cast<std::size_t>(whole.size(1)),
          std::vector<double>(data, data + whole.numel())};
}

inline double largest_difference(const at::Tensor& got, const Plain& expected) {
  const Plain values = plain_of(got);
  double largest = 0;
  for (std::size_t i = 0; i < values.values.size(); ++i) {
    largest = std::max(largest, std::abs(values.values[i] - expected.values[i]));
  }
  return largest;
}

inline double adjusted(AdjustLr rule, double lr, double rows, double cols) {
  if (rule == AdjustLr::kMatchRmsAdamw) return 0.2 * lr * std::sqrt(rows > cols ? rows : cols);
  const double ratio = std::sqrt(rows / cols);
  return lr * (rule == AdjustLr::kOriginal && ratio < 1 ? 1 : ratio);
}

inline PlainOptions plain_options(const MuonOptions& muon, std::int64_t rows, std::int64_t cols) {
  PlainOptions options{muon.lr, 0, muon.weight_decay, muon.momentum, muon.nesterov, {}};
  options.adjusted_lr =
      adjusted(muon.adjust_lr, muon.lr, static_cast<double>(rows), static_cast<double>(cols));
  for (const newton_schulz::Row& row : kCoefficients) {
    options.coefficients.push_back({row.a, row.b, row.c});
  }
  return options;
}

}  // namespace dmuon::optim
