#include "dmuon/optim/muon_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/optim/plain_muon.h"

namespace dmuon::optim {
namespace {

const newton_schulz::Coefficients kCoefficients{
    {3.4445, -4.775, 2.0315}, {4, -6.9, 3.2}, {1.9, -1.3, 0.4}};

MuonGroup group_of(double lr) {
  return {lr, 0.1, 0.9, true, kCoefficients, 1e-7, AdjustLr::kOriginal, at::kFloat};
}

at::Tensor random_tensor(std::vector<std::int64_t> sizes, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  at::Tensor tensor = at::empty(sizes, at::TensorOptions().dtype(at::kFloat));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.mutable_data_ptr<float>()[i] = normal(random);
  }
  return tensor;
}

Plain plain_of(const at::Tensor& matrix) {
  const at::Tensor whole = matrix.contiguous();
  const auto* data = whole.const_data_ptr<float>();
  return {static_cast<std::size_t>(whole.size(0)), static_cast<std::size_t>(whole.size(1)),
          std::vector<double>(data, data + whole.numel())};
}

double largest_difference(const at::Tensor& got, const Plain& expected) {
  const Plain values = plain_of(got);
  double largest = 0;
  for (std::size_t i = 0; i < values.values.size(); ++i) {
    largest = std::max(largest, std::abs(values.values[i] - expected.values[i]));
  }
  return largest;
}

double adjusted(AdjustLr rule, double lr, double rows, double cols) {
  if (rule == AdjustLr::kMatchRmsAdamw) return 0.2 * lr * std::sqrt(rows > cols ? rows : cols);
  const double ratio = std::sqrt(rows / cols);
  return lr * (rule == AdjustLr::kOriginal && ratio < 1 ? 1 : ratio);
}

PlainOptions plain_options(const MuonGroup& group, std::int64_t rows, std::int64_t cols) {
  PlainOptions options{group.lr, 0, group.weight_decay, group.momentum, group.nesterov, {}};
  options.adjusted_lr =
      adjusted(group.adjust_lr, group.lr, static_cast<double>(rows), static_cast<double>(cols));
  for (const newton_schulz::Row& row : group.coefficients) {
    options.coefficients.push_back({row.a, row.b, row.c});
  }
  return options;
}

using Shape = std::pair<std::int64_t, std::int64_t>;

class MuonUpdate : public testing::TestWithParam<std::tuple<Shape, bool, AdjustLr, double>> {};

TEST_P(MuonUpdate, EqualsThePaperElementByElement) {
  const auto& [shape, nesterov, rule, weight_decay] = GetParam();
  const auto& [rows, cols] = shape;
  MuonGroup group = group_of(0.05);
  group.nesterov = nesterov;
  group.adjust_lr = rule;
  group.weight_decay = weight_decay;
  constexpr std::int64_t kBatch = 2;
  const at::Tensor master = random_tensor({kBatch, rows, cols}, 1);
  const at::Tensor momentum = at::zeros({kBatch, rows, cols});
  std::vector<Plain> masters;
  std::vector<Plain> momenta;
  for (std::int64_t i = 0; i < kBatch; ++i) {
    masters.push_back(plain_of(master[i]));
    momenta.push_back(plain_of(momentum[i]));
  }
  for (unsigned step = 0; step < 3; ++step) {
    const at::Tensor gradient = random_tensor({kBatch, rows, cols}, 10 + step);
    const at::Tensor before = gradient.clone();
    muon_update(master, momentum, gradient, group);
    EXPECT_TRUE(gradient.equal(before));
    for (std::size_t i = 0; i < kBatch; ++i) {
      const auto index = static_cast<std::int64_t>(i);
      plain_muon_update(&masters[i], &momenta[i], plain_of(gradient[index]),
                        plain_options(group, rows, cols));
      EXPECT_LE(largest_difference(master[index], masters[i]), 2e-5) << "step " << step;
      EXPECT_LE(largest_difference(momentum[index], momenta[i]), 2e-6) << "step " << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, MuonUpdate,
                         testing::Combine(testing::Values(Shape{5, 5}, Shape{3, 8}, Shape{9, 4},
                                                          Shape{1, 6}, Shape{6, 1}),
                                          testing::Bool(),
                                          testing::Values(AdjustLr::kOriginal,
                                                          AdjustLr::kMatchRmsAdamw,
                                                          AdjustLr::kSpectralUnclamped),
                                          testing::Values(0.0, 0.1)));

TEST(MuonUpdate, DecaysAWeightWithoutAGradient) {
  const at::Tensor master = random_tensor({1, 3, 4}, 1);
  const at::Tensor expected = master.mul(1 - 0.05 * 0.1);
  muon_update(master, at::zeros({1, 3, 4}), at::zeros({1, 3, 4}), group_of(0.05));
  EXPECT_TRUE(master.allclose(expected, 1e-6, 0));
}

TEST(MuonUpdate, OfLearningRateZeroChangesMomentumAlone) {
  const at::Tensor master = random_tensor({1, 3, 4}, 1);
  const at::Tensor before = master.clone();
  const at::Tensor momentum = at::zeros({1, 3, 4});
  muon_update(master, momentum, random_tensor({1, 3, 4}, 2), group_of(0));
  EXPECT_TRUE(master.equal(before));
  EXPECT_GT(momentum.abs().sum().item<float>(), 0);
}

// One rank that owns four 3 x 4 matrices in one batch and a 2 x 2 one.
struct Owner {
  std::shared_ptr<engine::Engine> engine;
  std::unique_ptr<MuonState> state;

  Owner() {
    const engine::Group alone(nullptr, "row", 0, 1);
    std::vector<engine::MatrixSpec> specs(4, {3, 4, 0, 0});
    specs.push_back({2, 2, 0, 0});
    const std::vector<engine::UnitSpec> units{{"unit", {0, 1, 2, 3, 4}, at::kFloat, at::kFloat}};
    const std::vector<std::vector<int>> batches{{0, 1, 2, 3}, {4}};
    engine = std::make_shared<engine::Engine>(
        engine::Options{}, engine::Groups{alone, alone, alone, alone}, specs, units, batches);
    unsigned seed = 20;
    for (engine::OwnedBatch& batch : engine->batches()) {
      batch.master.copy_(random_tensor(batch.master.sizes().vec(), ++seed));
      batch.gradient.copy_(random_tensor(batch.gradient.sizes().vec(), ++seed));
    }
    state = std::make_unique<MuonState>(engine);
  }
};

TEST(MuonState, UpdatesEachMatrixByItsGroup) {
  const std::vector<MuonGroup> groups{group_of(0.05), group_of(0.2)};
  for (const std::vector<int>& of : {std::vector<int>{0, 0, 0, 0, 0},
                                     {0, 1, 0, 1, 1},
                                     {1, 1, 0, 0, 0},
                                     {0, -1, -1, 1, -1},
                                     {-1, -1, -1, -1, -1}}) {
    Owner owner;
    std::vector<Plain> masters;
    std::vector<Plain> momenta;
    for (int matrix = 0; matrix < 5; ++matrix) {
      masters.push_back(plain_of(owner.state->master(matrix)));
      momenta.push_back(plain_of(owner.state->momentum(matrix)));
      const int index = of[static_cast<std::size_t>(matrix)];
      if (index < 0) continue;
      const at::Tensor gradient = owner.state->gradient(matrix);
      plain_muon_update(&masters.back(), &momenta.back(), plain_of(gradient),
                        plain_options(groups[static_cast<std::size_t>(index)], gradient.size(0),
                                      gradient.size(1)));
    }
    owner.state->step(groups, of);
    for (int matrix = 0; matrix < 5; ++matrix) {
      const auto i = static_cast<std::size_t>(matrix);
      // What is left alone is left bit by bit.
      const double allowed = of[i] < 0 ? 0 : 2e-5;
      EXPECT_LE(largest_difference(owner.state->master(matrix), masters[i]), allowed);
      EXPECT_LE(largest_difference(owner.state->momentum(matrix), momenta[i]), allowed);
    }
  }
}

TEST(MuonState, StartsWithZeroMomentumAndCountsIt) {
  Owner owner;
  for (int matrix = 0; matrix < 5; ++matrix) {
    EXPECT_EQ(owner.state->momentum(matrix).abs().sum().item<float>(), 0);
  }
  // Master, gradient and momentum, 4 bytes each.
  EXPECT_EQ(owner.engine->statistics().at("current_bytes"), 3 * 4 * (4 * 12 + 4));
}

TEST(MuonState, ScalesGradientsAlone) {
  Owner owner;
  const at::Tensor gradient = owner.state->gradient(2).clone();
  const at::Tensor master = owner.state->master(2).clone();
  owner.state->scale_gradients(0.25);
  EXPECT_TRUE(owner.state->gradient(2).equal(gradient.mul(0.25)));
  EXPECT_TRUE(owner.state->master(2).equal(master));
}

TEST(MuonState, HasNothingOfAMatrixThatAnotherRankOwns) {
  const engine::Group alone(nullptr, "row", 0, 1);
  const auto engine = std::make_shared<engine::Engine>(
      engine::Options{}, engine::Groups{alone, alone, alone, alone},
      std::vector<engine::MatrixSpec>{{3, 4, 0, 1}},
      std::vector<engine::UnitSpec>{{"unit", {0}, at::kFloat, at::kFloat}},
      std::vector<std::vector<int>>{});
  const MuonState state(engine);
  EXPECT_FALSE(state.master(0).defined());
  EXPECT_FALSE(state.momentum(0).defined());
  EXPECT_FALSE(state.gradient(0).defined());
}

}  // namespace
}  // namespace dmuon::optim
