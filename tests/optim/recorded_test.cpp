#include "dmuon/optim/rules/recorded.h"

#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_svdvals.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "dmuon/optim/muon_update.h"
#include "dmuon/plan/state_bytes.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

using at::Tensor;

MuonGroup recorded_group(const std::string& rule) {
  MuonGroup group = group_of(rule, with_second_moment());
  group.rule = std::make_shared<Recorded>(group.rule);
  return group;
}

float number(const Tensor& x) { return x.item<float>(); }

// Muon's orthogonalised update of a matrix, from a step that decays nothing.
Tensor orthogonalised(const Tensor& gradient, const Tensor& momentum) {
  MuonOptions options = with_second_moment();
  options.weight_decay = 0;
  const Tensor master = at::zeros_like(gradient);
  muon_update(master, momentum.clone(), gradient, group_of(options), kApplies);
  const double rate =
      adjusted(options.adjust_lr, options.lr, static_cast<double>(gradient.size(-2)),
               static_cast<double>(gradient.size(-1)));
  return master.div(-rate);
}

TEST(Recorded, HasTheFiguresOfEachUpdateByAnyRule) {
  for (const std::string& rule : {std::string("muon"), std::string("normuon")}) {
    for (const auto& [rows, cols, blocks] : {std::tuple{6, 9, 1}, {9, 6, 1}, {40, 60, 2}}) {
      const MuonGroup group = recorded_group(rule);
      const Tensor master = random_tensor({2, rows, cols}, 1);
      const std::vector<Tensor> states = states_for(*group.rule, master, blocks);
      states[0].copy_(random_tensor({2, rows, cols}, 2));
      const Tensor gradient = random_tensor({2, rows, cols}, 3);
      const Tensor before = master.clone();
      const Tensor momentum = states[0].clone();
      update_with(group, master, gradient, states, blocks);
      for (std::int64_t i = 0; i < 2; ++i) {
        for (std::int64_t block = 0; block < blocks; ++block) {
          const auto part = [&](const Tensor& x) {
            return x[i].chunk(blocks, 1).at(static_cast<std::size_t>(block)).contiguous();
          };
          const Tensor figures = part(states.back())[0];
          const Tensor change = part(master).sub(part(before));
          EXPECT_NEAR(number(figures[0]), number(change.square().mean().sqrt()), 1e-6);
          const Tensor o = orthogonalised(part(gradient), part(momentum));
          const Tensor values = at::linalg_svdvals(o);
          EXPECT_LE(number(figures[1]), number(values[0]) * 1.0001);
          EXPECT_GE(number(figures[1]), number(values[0]) * 0.95);
          const double residual = number(values.square().sub(1).square().mean().sqrt());
          EXPECT_NEAR(number(figures[2]), residual, 1e-3 * (1 + residual)) << rule << rows;
          const Tensor g = part(gradient).flatten();
          const Tensor m = part(momentum).flatten();
          EXPECT_NEAR(number(figures[3]), number(g.dot(m).div(g.norm().mul(m.norm()))), 1e-5);
        }
      }
    }
  }
}

TEST(Recorded, ChangesNoBitOfWeightsAndStates) {
  for (const std::string& rule : plan::rule_names()) {
    const Tensor gradient = random_tensor({2, 24, 40}, 3);
    std::vector<Tensor> results;
    for (const bool records : {false, true}) {
      const MuonGroup group = records ? recorded_group(rule) : group_of(rule, with_second_moment());
      const Tensor master = random_tensor({2, 24, 40}, 1);
      const std::vector<Tensor> states = states_for(*group.rule, master);
      for (int step = 0; step < 2; ++step) update_with(group, master, gradient, states);
      results.push_back(master);
      results.push_back(states[0]);
    }
    EXPECT_TRUE(results[0].equal(results[2])) << rule;
    EXPECT_TRUE(results[1].equal(results[3])) << rule;
  }
}

TEST(Recorded, OfAStepThatDoesNotApplyHasNoChange) {
  const MuonGroup group = recorded_group("muon");
  const Tensor master = random_tensor({1, 6, 9}, 1);
  const std::vector<Tensor> states = states_for(*group.rule, master);
  update_with(group, master, random_tensor({1, 6, 9}, 2), states, 1, false,
              at::logical_not(kApplies));
  EXPECT_EQ(number(states.back()[0][0][0]), 0);
}

}  // namespace
}  // namespace dmuon::optim
