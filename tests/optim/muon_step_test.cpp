#include "dmuon/optim/muon_step.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dmuon/optim/muon_update.h"
#include "tests/optim/groups.h"

namespace dmuon::optim {
namespace {

using Shape = std::pair<std::int64_t, std::int64_t>;

class MuonUpdateCases : public testing::TestWithParam<std::tuple<Shape, bool, AdjustLr, double>> {};

TEST_P(MuonUpdateCases, EqualsThePaperElementByElement) {
  const auto& [shape, nesterov, rule, weight_decay] = GetParam();
  const auto& [rows, cols] = shape;
  MuonOptions group = muon(0.05);
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
    muon_update(master, momentum, gradient, group_of(group), kApplies);
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

INSTANTIATE_TEST_SUITE_P(Cases, MuonUpdateCases,
                         testing::Combine(testing::Values(Shape{5, 5}, Shape{3, 8}, Shape{9, 4},
                                                          Shape{1, 6}, Shape{6, 1}),
                                          testing::Bool(),
                                          testing::Values(AdjustLr::kOriginal,
                                                          AdjustLr::kMatchRmsAdamw,
                                                          AdjustLr::kSpectralUnclamped),
                                          testing::Values(0.0, 0.1)));

TEST(MuonUpdateFunction, DecaysAWeightWithoutAGradient) {
  const at::Tensor master = random_tensor({1, 3, 4}, 1);
  const at::Tensor expected = master.mul(1 - 0.05 * 0.1);
  muon_update(master, at::zeros({1, 3, 4}), at::zeros({1, 3, 4}), group_of(muon(0.05)), kApplies);
  EXPECT_TRUE(master.allclose(expected, 1e-6, 0));
}

TEST(MuonUpdateFunction, OfLearningRateZeroChangesMomentumAlone) {
  const at::Tensor master = random_tensor({1, 3, 4}, 1);
  const at::Tensor before = master.clone();
  const at::Tensor momentum = at::zeros({1, 3, 4});
  muon_update(master, momentum, random_tensor({1, 3, 4}, 2), group_of(muon(0)), kApplies);
  EXPECT_TRUE(master.equal(before));
  EXPECT_GT(momentum.abs().sum().item<float>(), 0);
}

TEST(MuonUpdateFunction, ThatDoesNotApplyChangesNothingWhateverTheGradientHolds) {
  for (const bool nesterov : {true, false}) {
    MuonOptions group = muon(0.05);
    group.nesterov = nesterov;
    const at::Tensor master = random_tensor({2, 3, 4}, 1);
    const at::Tensor momentum = random_tensor({2, 3, 4}, 2);
    master[0][0][0] = -0.0;
    momentum[0][1] = -0.0;
    const at::Tensor gradient = random_tensor({2, 3, 4}, 3);
    gradient[0][0][0] = NAN;
    gradient[1][2][3] = INFINITY;
    const at::Tensor before = at::cat({master, momentum});
    muon_update(master, momentum, gradient, group_of(group), at::logical_not(kApplies));
    EXPECT_TRUE(at::cat({master, momentum}).equal(before));
  }
}

// A user may have set it for the model's sake: no number of the update is rounded to it.
TEST(MuonUpdateFunction, DoesNotDependOnTheDefaultDtype) {
  const auto decayed = [] {
    const at::Tensor master = at::ones({1, 3, 4}, at::kFloat);
    const at::Tensor nothing = at::zeros({1, 3, 4}, at::kFloat);
    muon_update(master, nothing, nothing.clone(), group_of(muon(3e-4)), kApplies);
    return master;
  };
  const at::Tensor expected = decayed();
  const caffe2::TypeMeta usual = c10::get_default_dtype();
  c10::set_default_dtype(caffe2::TypeMeta::Make<c10::BFloat16>());
  const at::Tensor got = decayed();
  c10::set_default_dtype(usual);
  EXPECT_TRUE(got.equal(expected));
  EXPECT_LT(expected.max().item<float>(), 1);
}

using core::ParameterIndex;

// One rank, which owns all of these.
std::shared_ptr<engine::Engine> make_engine(const std::vector<plan::View>& views,
                                            const std::vector<std::vector<int>>& batches) {
  const wire::Group alone(nullptr, "row", 0, 1);
  plan::Plan plan;
  for (const plan::View& view : views) {
    plan.inventory.push_back({std::to_string(plan.inventory.size()), view});
    plan.owner.push_back(core::Owner(0));
  }
  for (const std::vector<int>& batch : batches)
    plan.batches.push_back({core::Owner(0), {batch.begin(), batch.end()}});
  const std::vector<engine::UnitSpec> units{{"unit", at::kFloat, at::kFloat}};
  auto engine = std::make_shared<engine::Engine>(
      engine::EngineOptions{}, wire::SharedMesh{{alone, alone}, {alone, alone}, alone}, plan,
      units);
  EXPECT_EQ(add_states(*engine, Muon({})), std::vector<std::string>{kMomentum});
  return engine;
}

// Four 3 x 4 matrices in one batch and a 2 x 2 one.
struct Owner {
  std::shared_ptr<engine::Engine> engine =
      make_engine({{1, 3, 4}, {1, 3, 4}, {1, 3, 4}, {1, 3, 4}, {1, 2, 2}}, {{0, 1, 2, 3}, {4}});

  Owner() {
    unsigned seed = 20;
    for (const ParameterIndex parameter : engine->parameters().indices()) {
      for (const std::string& name : {wire::kMaster, wire::kGradient}) {
        const std::vector<std::int64_t> sizes = engine->parameters()[parameter].view.sizes();
        engine->transfers().scatter(core::LeafIndex(parameter.value()), name,
                                    random_tensor(sizes, ++seed));
      }
      engine->owned().set_filled(parameter, true);
    }
  }

  at::Tensor of(ParameterIndex parameter, const std::string& name) {
    return engine->owned().of(parameter, name);
  }
};

TEST(MuonStep, UpdatesEachMatrixByItsGroup) {
  const std::vector<MuonOptions> groups{muon(0.05), muon(0.2)};
  using Of = core::Vector<ParameterIndex, int>;
  for (const Of& of : {Of{0, 0, 0, 0, 0}, Of{0, 1, 0, 1, 1}, Of{1, 1, 0, 0, 0},
                       Of{0, -1, -1, 1, -1}, Of{-1, -1, -1, -1, -1}}) {
    Owner owner;
    core::Vector<ParameterIndex, Plain> masters;
    core::Vector<ParameterIndex, Plain> momenta;
    for (const ParameterIndex parameter : of.indices()) {
      masters.push_back(plain_of(owner.of(parameter, wire::kMaster)));
      momenta.push_back(plain_of(owner.of(parameter, kMomentum)));
      if (of[parameter] < 0) continue;
      const at::Tensor gradient = owner.of(parameter, wire::kGradient);
      const MuonOptions& group = groups[static_cast<std::size_t>(of[parameter])];
      plain_muon_update(&masters[parameter], &momenta[parameter], plain_of(gradient),
                        plain_options(group, gradient.size(0), gradient.size(1)));
    }
    muon_step(*owner.engine, groups_of(groups), of, kApplies);
    for (const ParameterIndex parameter : of.indices()) {
      // What is left alone is left bit by bit.
      const double allowed = of[parameter] < 0 ? 0 : 2e-5;
      EXPECT_LE(largest_difference(owner.of(parameter, wire::kMaster), masters[parameter]),
                allowed);
      EXPECT_LE(largest_difference(owner.of(parameter, kMomentum), momenta[parameter]), allowed);
    }
  }
}

// The update comes first, so that weights decay before; a parameter without a group has rows too.
TEST(MuonStep, MultipliesRowsBehindTheRule) {
  const core::Vector<ParameterIndex, int> of{0, 0, -1, 0, 0};
  Owner plain;
  muon_step(*plain.engine, groups_of({muon(0.2)}), of, kApplies);
  Owner scaled;
  const at::Tensor factors = at::tensor({0.5F, 1.F, 3.F});
  muon_step(*scaled.engine, groups_of({muon(0.2)}), of, kApplies, nullptr,
            {{ParameterIndex(1), factors}, {ParameterIndex(2), factors}});
  for (const ParameterIndex parameter : of.indices()) {
    at::Tensor expected = plain.of(parameter, wire::kMaster);
    if (parameter.value() == 1 || parameter.value() == 2) expected.mul_(factors.view({3, 1}));
    EXPECT_TRUE(scaled.of(parameter, wire::kMaster).equal(expected));
    EXPECT_TRUE(scaled.of(parameter, kMomentum).equal(plain.of(parameter, kMomentum)));
  }
}

// Beside it in the batch lies a parameter of another group. Learning rates follow from the shape of
// a matrix, here 3 x 7, not of the stack.
TEST(MuonStep, TrainsAStackOfMatricesAsItTrainsThemApart) {
  const auto stacked = make_engine({{3, 3, 7}, {1, 3, 7}}, {{0, 1}});
  const auto apart = make_engine({{1, 3, 7}, {1, 3, 7}, {1, 3, 7}, {1, 3, 7}}, {{0, 1, 2, 3}});
  std::vector<MuonOptions> groups{muon(0.05), muon(0.2)};
  groups[0].adjust_lr = AdjustLr::kMatchRmsAdamw;
  // [4, 3, 7], wherever the values lie.
  const auto whole = [](engine::Engine& engine, const std::string& name) {
    return engine.owned().batches()[core::BatchIndex(0)].tensors.at(name);
  };
  const at::Tensor start = random_tensor({4, 3, 7}, 1);
  for (engine::Engine* engine : {stacked.get(), apart.get()}) whole(*engine, "master").copy_(start);
  EXPECT_EQ(stacked->owned().of(ParameterIndex(0), "master").sizes().vec(),
            (std::vector<std::int64_t>{3, 3, 7}));
  for (unsigned step = 0; step < 3; ++step) {
    const at::Tensor gradient = random_tensor({4, 3, 7}, 10 + step);
    whole(*stacked, "gradient").copy_(gradient);
    whole(*apart, "gradient").copy_(gradient);
    muon_step(*stacked, groups_of(groups), core::Vector<ParameterIndex, int>{0, 1}, kApplies);
    muon_step(*apart, groups_of(groups), core::Vector<ParameterIndex, int>{0, 0, 0, 1}, kApplies);
    EXPECT_TRUE(whole(*stacked, "master").equal(whole(*apart, "master"))) << "step " << step;
    EXPECT_TRUE(whole(*stacked, kMomentum).equal(whole(*apart, kMomentum))) << "step " << step;
  }
  EXPECT_FALSE(whole(*stacked, "master").equal(start));
}

// The same matrices, side by side in two parameters and one after the other in six. The second
// parameter is of a group without Nesterov's step.
TEST(MuonStep, TrainsBlocksOfColumnsAsItTrainsThemApart) {
  const auto wide = make_engine({{1, 4, 9, 3, true}, {1, 4, 9, 3, true}}, {{0, 1}});
  const auto apart = make_engine(std::vector<plan::View>(6, {1, 3, 4}), {{0, 1, 2, 3, 4, 5}});
  std::vector<MuonOptions> groups{muon(0.05), muon(0.2)};
  groups[0].adjust_lr = AdjustLr::kSpectralUnclamped;
  groups[1].nesterov = false;
  // [6, 3, 4]: what is stored as [in, out] as [out, in].
  const auto matrices = [](engine::Engine& engine, const std::string& name) {
    const at::Tensor whole = engine.owned().batches()[core::BatchIndex(0)].tensors.at(name);
    if (whole.size(0) == 6) return whole;
    return whole.view({2, 4, 3, 3}).permute({0, 2, 3, 1}).reshape({6, 3, 4});
  };
  const auto put = [&](const std::string& name, const at::Tensor& values) {
    const auto whole = [&](engine::Engine& engine) {
      return engine.owned().batches()[core::BatchIndex(0)].tensors.at(name);
    };
    whole(*apart).copy_(values);
    whole(*wide).copy_(values.view({2, 3, 3, 4}).permute({0, 3, 1, 2}).reshape({2, 4, 9}));
  };
  put(wire::kMaster, random_tensor({6, 3, 4}, 1));
  for (unsigned step = 0; step < 3; ++step) {
    put(wire::kGradient, random_tensor({6, 3, 4}, 10 + step));
    muon_step(*wide, groups_of(groups), core::Vector<ParameterIndex, int>{0, 1}, kApplies);
    muon_step(*apart, groups_of(groups), core::Vector<ParameterIndex, int>{0, 0, 0, 1, 1, 1},
              kApplies);
    for (const std::string& name : {wire::kMaster, kMomentum}) {
      EXPECT_TRUE(matrices(*wide, name).allclose(matrices(*apart, name), 1e-5, 1e-6))
          << name << ", step " << step;
    }
  }
}

// Two batches that alternate: each call is seen by itself, and only in its batch. On a CPU all
// happens in orthogonalise().
TEST(MuonUpdate, MovesMomentumAndWeightsOfItsBatchPieceByPiece) {
  Owner owner;
  const std::vector<MuonOptions> groups{muon(0.05), muon(0.2)};
  const core::Vector<ParameterIndex, int> of{0, 0, 1, -1, 1};
  core::Vector<ParameterIndex, Plain> before_masters;
  core::Vector<ParameterIndex, Plain> masters;
  core::Vector<ParameterIndex, Plain> momenta;
  for (const ParameterIndex parameter : of.indices()) {
    masters.push_back(plain_of(owner.of(parameter, wire::kMaster)));
    momenta.push_back(plain_of(owner.of(parameter, kMomentum)));
    before_masters.push_back(masters[parameter]);
    if (of[parameter] < 0) continue;
    const at::Tensor gradient = owner.of(parameter, wire::kGradient);
    plain_muon_update(&masters[parameter], &momenta[parameter], plain_of(gradient),
                      plain_options(groups[static_cast<std::size_t>(of[parameter])],
                                    gradient.size(0), gradient.size(1)));
  }
  const auto expect = [&](const std::vector<bool>& updated) {
    for (const ParameterIndex parameter : of.indices()) {
      const std::size_t batch = parameter.value() == 4 ? 1 : 0;
      const at::Tensor momentum = owner.of(parameter, kMomentum);
      if (updated[batch]) {
        EXPECT_LE(largest_difference(momentum, momenta[parameter]), 2e-6) << parameter;
      } else {
        EXPECT_EQ(momentum.count_nonzero().item<std::int64_t>(), 0) << parameter;
      }
      const Plain& master = (updated[batch] ? masters : before_masters)[parameter];
      EXPECT_LE(largest_difference(owner.of(parameter, wire::kMaster), master),
                updated[batch] ? 2e-5 : 0)
          << parameter;
    }
  };
  const core::BatchIndex first(0);
  const core::BatchIndex second(1);
  MuonUpdate update(owner.engine->owned(), groups_of(groups), of, kApplies);
  update.prepare(first);
  update.prepare(second);
  expect({false, false});
  update.orthogonalise(second);
  expect({false, true});
  update.orthogonalise(first);
  expect({true, true});
  update.apply(second);
  update.apply(first);
  expect({true, true});
}

TEST(AddMomentum, StartsWithZerosAndCountsThem) {
  Owner owner;
  for (const ParameterIndex parameter : owner.engine->parameters().indices())
    EXPECT_EQ(owner.of(parameter, kMomentum).abs().sum().item<float>(), 0);
  // Master, gradient and momentum, 4 bytes each.
  EXPECT_EQ(owner.engine->statistics().at("current_bytes"), 3 * 4 * (4 * 12 + 4));
}

TEST(MuonStep, LeavesGradientsToTheEngineWhichScalesThemAlone) {
  Owner owner;
  const ParameterIndex second(2);
  const at::Tensor gradient = owner.of(second, wire::kGradient).clone();
  const at::Tensor master = owner.of(second, wire::kMaster).clone();
  owner.engine->scale_gradients(at::scalar_tensor(0.25));
  EXPECT_TRUE(owner.of(second, wire::kGradient).equal(gradient.mul(0.25)));
  EXPECT_TRUE(owner.of(second, wire::kMaster).equal(master));
}

// Twice, and in runs of two groups: the steps have the bits of gradients that a pass has scaled.
TEST(MuonStep, TakesTheFactorOfGradientsWithoutAPassOverThem) {
  const core::Vector<ParameterIndex, int> of{0, 1, 1, 0, 1};
  std::vector<MuonOptions> groups{muon(0.05), muon(0.2)};
  groups[1].nesterov = false;
  Owner waits;
  Owner scaled;
  const auto memory = [](Owner& owner) {
    return owner.engine->owned().batches()[core::BatchIndex(0)].tensors.at(wire::kGradient);
  };
  const at::Tensor before = memory(waits).clone();
  for (Owner* owner : {&waits, &scaled})
    owner->engine->scale_gradients(at::scalar_tensor(0.3, at::kFloat));
  EXPECT_TRUE(scaled.of(ParameterIndex(0), wire::kGradient).equal(before[0].mul(0.3F)));
  for (int step = 0; step < 2; ++step) {
    for (Owner* owner : {&waits, &scaled})
      muon_step(*owner->engine, groups_of(groups), of, kApplies);
    EXPECT_TRUE(memory(waits).equal(before));
    for (const ParameterIndex parameter : of.indices()) {
      for (const std::string& name : {wire::kMaster, kMomentum})
        EXPECT_TRUE(waits.of(parameter, name).equal(scaled.of(parameter, name))) << parameter;
    }
  }
}

// Half of the matrices go back, as far as they would have gone.
TEST(MuonStep, MultipliesGradientsForARuleThatTakesNoFactor) {
  std::vector<MuonGroup> groups = groups_of({muon(0.05), muon(0.05)});
  groups[1].rule = std::make_shared<Rows>();
  const core::Vector<ParameterIndex, int> of{0, 1, 1, 0, 1};
  Owner waits;
  Owner scaled;
  for (Owner* owner : {&waits, &scaled}) {
    add_states(*owner->engine, *groups[1].rule);
    owner->engine->scale_gradients(at::scalar_tensor(-0.5, at::kFloat));
  }
  scaled.of(ParameterIndex(0), wire::kGradient);
  for (Owner* owner : {&waits, &scaled}) muon_step(*owner->engine, groups, of, kApplies);
  for (const ParameterIndex parameter : of.indices()) {
    for (const std::string& name : {wire::kMaster, wire::kGradient})
      EXPECT_TRUE(waits.of(parameter, name).equal(scaled.of(parameter, name))) << parameter;
  }
}

}  // namespace
}  // namespace dmuon::optim
