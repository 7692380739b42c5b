// The engine under hooks and autograd: whole steps of a small model on every mesh. Long: the model
// and all that is expected of its steps belong together.

#include "dmuon/engine/engine.h"

#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/autograd.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

using Clock = std::chrono::steady_clock;
using Units = std::vector<int>;

const Units kAll{0, 1, 2};

// Each unit adds scale / 2 times the squares of its weights to what passes through it, so that the
// gradient of a weight is scale times the weight itself, as its backward finds it.
class Model {
 public:
  explicit Model(Engine& engine) : engine_(engine) {
    for (const UnitIndex unit : kUnits) {
      std::vector<at::Tensor> parameters;
      for (const at::Tensor& weight : engine.unit(unit).weight_tensors()) {
        parameters.push_back(weight.set_requires_grad(true));
      }
      engine.bind(unit, parameters);
      parameters_.push_back(std::move(parameters));
    }
  }

  at::Tensor use(UnitIndex unit, const at::Tensor& input, double scale) {
    engine_.before_forward(unit);
    const bool training = c10::GradMode::is_enabled();
    const auto call = std::make_shared<Call>();
    at::Tensor output = training ? engine_.watch_inputs(unit, {input}, call, [] {})[0] : input;
    for (const at::Tensor& parameter : parameters_[unit]) {
      output = output.add(parameter.square().sum(), scale / 2);
    }
    engine_.after_forward(unit);
    if (training) engine_.watch_outputs(unit, {output}, call);
    return output;
  }

  at::Tensor forward(const Units& units, double scale) {
    engine_.begin_forward();
    at::Tensor x = at::ones({}).set_requires_grad(c10::GradMode::is_enabled());
    for (const int unit : units) x = use(UnitIndex(unit), x, scale);
    if (c10::GradMode::is_enabled()) engine_.watch_root_outputs({x});
    return x;
  }

  void step(const Units& units, double scale) { forward(units, scale).backward(); }

 private:
  Engine& engine_;
  core::Vector<UnitIndex, std::vector<at::Tensor>> parameters_;
};

void clear_all(Engine& engine) {
  for (const LeafIndex leaf : engine.leaves().indices()) engine.clear_gradient(leaf);
}

// Every owned gradient is `factors[unit]` times the weight of `seed`, to fp32's last bits.
void expect_gradients(Engine& engine, int seed, const std::vector<double>& factors) {
  engine.settle();  // what a backward sent last may still be on its way
  for (const ParameterIndex parameter : engine.parameters().indices()) {
    if (!engine.owned().owns(parameter)) continue;
    const layout::OwnedParameter& of = engine.parameters()[parameter];
    const at::Tensor expected =
        integers(of, seed + parameter.value()).mul(factors[of.unit_index().position()]);
    const at::Tensor gradient = owned_gradient(engine, parameter);
    ASSERT_TRUE(gradient.defined()) << "parameter " << parameter;
    EXPECT_LE(gradient.sub(expected).abs().max().item<float>(), 2e-4F) << "parameter " << parameter;
  }
}

class EngineOnMesh : public testing::TestWithParam<Mesh> {
 protected:
  // Calls `body(engine, model, rank)` on all ranks, with the masters of seed 1 published.
  template <typename Body>
  void run(const Setting& setting, Body body) {
    wire::run_ranks(setting.mesh.num_slots(), [&](int rank, const wire::StorePtr& store) {
      const auto engine = make_engine(setting, store, rank);
      set_masters(*engine, 1);
      engine->publish();
      Model model(*engine);
      body(*engine, model, rank);
    });
  }

  Setting setting() const { return setting_on(GetParam()); }
  int size() const { return GetParam().num_slots(); }
  double mean_scale() const { return (size() + 1) / 2.0; }  // of rank + 1
};

TEST_P(EngineOnMesh, GivesOwnersTheMeanGradientOfEachStep) {
  for (const bool reshard : {true, false}) {
    Setting chosen = setting();
    chosen.step.reshard_after_forward = reshard;
    run(chosen, [&](Engine& engine, Model& model, int rank) {
      for (int step = 0; step < 4; ++step) {
        set_masters(engine, 1 + step);
        engine.publish();
        clear_all(engine);
        model.step(kAll, rank + 1);
        EXPECT_TRUE(engine.agree().finite().item<bool>());
        expect_gradients(engine, 1 + step, {mean_scale(), mean_scale(), mean_scale()});
        for (const UnitIndex unit : kUnits) {
          EXPECT_FALSE(engine.ready(unit));
          EXPECT_FALSE(engine.unit(unit).gradients().allocated());
        }
      }
      EXPECT_EQ(engine.statistics().at("gradient_copies"), 0);
      EXPECT_EQ(engine.statistics().at("routes"), 4 * kNumUnits);
    });
  }
}

TEST_P(EngineOnMesh, FreesWeightsBetweenForwardAndBackwardUnlessAskedNotTo) {
  for (const bool reshard : {true, false}) {
    Setting chosen = setting();
    chosen.step.reshard_after_forward = reshard;
    run(chosen, [&](Engine& engine, Model& model, int) {
      const at::Tensor loss = model.forward(kAll, 1);
      for (const UnitIndex unit : kUnits) EXPECT_EQ(engine.ready(unit), !reshard);
      loss.backward();
      EXPECT_EQ(engine.statistics().at("unshards"), (reshard ? 2 : 1) * kNumUnits);
      // Once the order is known the last unit stays for the backward, which begins with it.
      const at::Tensor next = model.forward(kAll, 1);
      for (const UnitIndex unit : kUnits) {
        EXPECT_EQ(engine.ready(unit), !reshard || unit == UnitIndex(kNumUnits - 1));
      }
      next.backward();
      EXPECT_EQ(engine.statistics().at("unshards"), reshard ? 4 * kNumUnits - 1 : 2 * kNumUnits);
    });
  }
}

TEST_P(EngineOnMesh, AddsMicroSteps) {
  run(setting(), [&](Engine& engine, Model& model, int rank) {
    for (int micro = 0; micro < 3; ++micro) model.step(kAll, rank + 1);
    expect_gradients(engine, 1, {3 * mean_scale(), 3 * mean_scale(), 3 * mean_scale()});
  });
}

TEST_P(EngineOnMesh, AddsMicroStepsToScaledGradients) {
  run(setting(), [&](Engine& engine, Model& model, int rank) {
    const at::Tensor half = at::scalar_tensor(0.5, at::kFloat);
    for (int micro = 0; micro < 2; ++micro) {
      model.step(kAll, rank + 1);
      engine.agree();
      engine.scale_gradients(half);
    }
    model.step(kAll, rank + 1);
    const double scale = (0.25 + 0.5 + 1) * mean_scale();
    expect_gradients(engine, 1, {scale, scale, scale});
    engine.scale_gradients(half);
    clear_all(engine);
    model.step(kAll, rank + 1);
    expect_gradients(engine, 1, {mean_scale(), mean_scale(), mean_scale()});
    const double norm = engine.agree().norm().item<double>();
    engine.forget_verdict();
    engine.scale_gradients(half);
    EXPECT_NEAR(engine.agree().norm().item<double>(), norm / 2, 1e-6 * norm);
  });
}

// What a rank skips in a replayed step it contributes as zeros.
TEST_P(EngineOnMesh, LetsRanksSkipUnitsOnceTraced) {
  run(setting(), [&](Engine& engine, Model& model, int rank) {
    model.step(kAll, 1);
    const std::vector<Units> parts{{0, 2}, {1}, {2}, {0, 1}};
    std::vector<double> factors(kNumUnits, 0);
    for (int other = 0; other < size(); ++other) {
      for (const int unit : parts[static_cast<std::size_t>(other)]) {
        factors[static_cast<std::size_t>(unit)] += 1.0 / size();
      }
    }
    const double compared = engine.statistics().at("comparisons");
    for (int step = 0; step < 3; ++step) {
      clear_all(engine);
      model.step(parts[static_cast<std::size_t>(rank)], 1);
      engine.agree();
      expect_gradients(engine, 1, factors);
      engine.end_step();
    }
    EXPECT_EQ(engine.statistics().at("comparisons"), compared);
  });
}

TEST_P(EngineOnMesh, RoutesAUnitThatIsUsedTwiceOnceInAReplay) {
  run(setting(), [&](Engine& engine, Model& model, int rank) {
    const Units twice{0, 1, 0, 2};
    for (int step = 0; step < 3; ++step) {
      clear_all(engine);
      const double routes = engine.statistics().at("routes");
      model.step(twice, rank + 1);
      expect_gradients(engine, 1, {2 * mean_scale(), mean_scale(), mean_scale()});
      if (step > 0) {
        EXPECT_EQ(engine.statistics().at("routes"), routes + kNumUnits);
      }
    }
  });
}

TEST_P(EngineOnMesh, FollowsANewOrderAfterComparingIt) {
  run(setting(), [&](Engine& engine, Model& model, int rank) {
    model.step({0, 1}, 1);
    for (int step = 0; step < 4; ++step) {
      const double compared = engine.statistics().at("comparisons");
      clear_all(engine);
      model.step({2, 1, 0}, rank + 1);
      engine.agree();
      expect_gradients(engine, 1, {mean_scale(), mean_scale(), mean_scale()});
      const bool compares = engine.statistics().at("comparisons") > compared;
      EXPECT_EQ(compares, step < 2) << "step " << step;  // deviates, traces, replays, replays
      engine.end_step();
    }
  });
}

TEST_P(EngineOnMesh, EvaluatesWithoutRouting) {
  run(setting(), [&](Engine& engine, Model& model, int rank) {
    model.step(kAll, rank + 1);
    const double routes = engine.statistics().at("routes");
    double expected = 1;
    for (const ParameterIndex parameter : engine.parameters().indices()) {
      const at::Tensor weight = integers(engine.parameters()[parameter], 1 + parameter.value());
      expected += weight.square().sum().item<double>() / 2;
    }
    for (int i = 0; i < 2; ++i) {
      c10::AutoGradMode no_grad(false);
      EXPECT_NEAR(model.forward(kAll, 1).item<double>(), expected, 1e-6 * expected);
    }
    engine.settle();
    EXPECT_EQ(engine.statistics().at("routes"), routes);
  });
}

TEST_P(EngineOnMesh, TrainsOnAfterABackwardThatRaised) {
  run(setting(), [&](Engine& engine, Model& model, int rank) {
    model.step(kAll, rank + 1);
    const at::Tensor x = model.forward({0}, 1);
    on_gradient_of(x, [] { throw std::runtime_error("from the user"); });
    EXPECT_THROW(model.use(UnitIndex(2), model.use(UnitIndex(1), x, 1), 1).backward(),
                 std::runtime_error);
    engine.settle();
    for (int step = 0; step < 2; ++step) {
      clear_all(engine);
      model.step(kAll, rank + 1);
      engine.agree();
      expect_gradients(engine, 1, {mean_scale(), mean_scale(), mean_scale()});
      engine.end_step();
    }
  });
}

TEST_P(EngineOnMesh, RaisesOnEveryRankWhereATracedStepDiffers) {
  if (size() == 1) return;
  run(setting(), [&](Engine&, Model& model, int rank) {
    try {
      model.step(rank == size() - 1 ? Units{0, 2} : kAll, 1);
      ADD_FAILURE() << "rank " << rank << " did not notice";
    } catch (const core::InvalidArgument& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("the use of 'unit 1'"), std::string::npos) << message;
      EXPECT_NE(message.find("the use of 'unit 2'"), std::string::npos) << message;
    }
  });
}

TEST_P(EngineOnMesh, TellsOfADeadRankWithinTheTimeout) {
  if (size() == 1) return;
  Setting chosen = setting();
  chosen.timeout = std::chrono::milliseconds(1000);
  const auto start = Clock::now();
  run(chosen, [&](Engine&, Model& model, int rank) {
    model.step(kAll, 1);
    if (rank == size() - 1) return;  // its engine and process groups go with it
    const auto try_on = [&] {
      for (int step = 0; step < 3; ++step) model.step(kAll, 1);
    };
    EXPECT_THROW(try_on(), core::CommError);
  });
  EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(3500));
}

INSTANTIATE_TEST_SUITE_P(Meshes, EngineOnMesh,
                         testing::Values(Mesh{1, 1}, Mesh{1, 2}, Mesh{2, 2}, Mesh{1, 3},
                                         Mesh{2, 1}),
                         [](const auto& given) { return mesh_name(given.param); });

class FailsInApply final : public Update {
 public:
  explicit FailsInApply(bool fails) : fails_(fails) {}
  void prepare(core::BatchIndex) override {}
  void orthogonalise(core::BatchIndex) override {}
  void apply(core::BatchIndex) override {
    if (fails_) throw std::domain_error("no memory");
  }

 private:
  bool fails_;
};

void expect_failed_update(const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "did not raise";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("dmuon: in the update of '"), std::string::npos) << text;
    EXPECT_NE(text.find(" more in step 1"), std::string::npos) << text;
    EXPECT_TRUE(text.ends_with(": no memory")) << text;
  }
}

// Meanwhile the connections of the rank stay open.
void stay_until(const std::atomic<bool>& raised) {
  const auto start = Clock::now();
  while (!raised && Clock::now() - start < wire::kTimeout)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

// Its peer finds out that it waits in vain although the rank's program and its connections go on.
TEST(Engine, EndsTheWaitsOfOthersWhereAnUpdateFails) {
  for (const Mesh mesh : {Mesh{1, 2}, Mesh{2, 1}}) {
    const Setting setting = setting_on(mesh);
    const auto start = Clock::now();
    std::atomic<bool> raised = false;
    wire::run_ranks(2, [&](int rank, const wire::StorePtr& store) {
      wire::SharedMesh shared = make_mesh(setting, store, rank);
      Engine engine(EngineOptions{}, shared, plan_of(setting.parameters, setting.mesh),
                    unit_specs(setting));
      set_masters(engine, 1);
      Model model(engine);
      model.step(kAll, 1);  // traced, so that a step sends weights
      engine.agree();
      if (rank == 1) {
        expect_failed_update([&] { engine.step(std::make_shared<FailsInApply>(true)); });
        return stay_until(raised);
      }
      engine.step(std::make_shared<FailsInApply>(false));
      engine.end_step();
      EXPECT_THROW(model.step(kAll, 1), core::CommError);
      raised = true;
    });
    EXPECT_LT(Clock::now() - start, wire::kTimeout / 2);
  }
}

// It has come to the publications already, so its peer could wait for them until a timeout.
TEST(Engine, RaisesOnAllRanksWhereALateUpdateFails) {
  for (const Mesh mesh : {Mesh{1, 2}, Mesh{2, 1}}) {
    Setting setting = setting_on(mesh);
    setting.step.late_updates = true;
    const auto start = Clock::now();
    std::atomic<bool> raised = false;
    wire::run_ranks(2, [&](int rank, const wire::StorePtr& store) {
      const auto engine = make_engine(setting, store, rank);
      set_masters(*engine, 1);
      Model model(*engine);
      model.step(kAll, 1);  // traced, so that a step sends weights
      engine->agree();
      engine->step(std::make_shared<FailsInApply>(rank == 1));
      engine->end_step();
      if (rank == 1) {
        expect_failed_update([&] { model.step(kAll, 1); });
        return stay_until(raised);
      }
      try {
        model.step(kAll, 1);
        ADD_FAILURE() << "did not raise";
      } catch (const core::CommError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("rank 1 of the mesh"), std::string::npos) << text;
        EXPECT_NE(text.find("is over: the update of '"), std::string::npos) << text;
        EXPECT_NE(text.find("in step 1 has failed: no memory"), std::string::npos) << text;
      }
      raised = true;
    });
    EXPECT_LT(Clock::now() - start, wire::kTimeout / 2);
  }
}

// The lanes hold what the failed model had sent ahead, so the other model's messages fail as well.
TEST(Engine, RaisesOnAllRanksWhereTheLateUpdateOfAnotherModelFails) {
  for (const Mesh mesh : {Mesh{1, 2}, Mesh{2, 1}}) {
    Setting setting = setting_on(mesh);
    setting.step.late_updates = true;
    const auto start = Clock::now();
    std::atomic<bool> raised = false;
    wire::run_ranks(2, [&](int rank, const wire::StorePtr& store) {
      const wire::SharedMesh shared = make_mesh(setting, store, rank);
      const EngineOptions options{.step = setting.step};
      Engine failing(options, shared, plan_of(setting.parameters, mesh), unit_specs(setting));
      Engine other(options, shared, plan_of(setting.parameters, mesh), unit_specs(setting));
      Model failing_model(failing);
      Model other_model(other);
      for (auto [engine, model] : {std::pair(&failing, &failing_model), {&other, &other_model}}) {
        set_masters(*engine, 1);
        model->step(kAll, 1);  // traced, as above
        engine->agree();
      }
      failing.step(std::make_shared<FailsInApply>(rank == 1));
      failing.end_step();
      const auto go_on = [&] {
        other.step(std::make_shared<FailsInApply>(false));
        other.end_step();
        other_model.step(kAll, 1);
      };
      if (rank == 1) {
        expect_failed_update(go_on);
        return stay_until(raised);
      }
      EXPECT_THROW(go_on(), core::CommError);
      raised = true;
    });
    EXPECT_LT(Clock::now() - start, wire::kTimeout / 2);
  }
}

// Runs micro-steps, all but the last under no_sync, on a mesh where units 1 and 2 are the host's.
void expect_agreement(Mesh mesh, const std::vector<Units>& micro_steps, bool no_sync, bool agrees) {
  Setting setting = setting_on(mesh);
  setting.host_units = {UnitIndex(1), UnitIndex(2)};
  wire::run_ranks(mesh.num_slots(), [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    set_masters(*engine, 1);
    engine->publish();
    Model model(*engine);
    for (std::size_t i = 0; i < micro_steps.size(); ++i) {
      engine->set_sync(!no_sync || i + 1 == micro_steps.size());
      model.step(micro_steps[i], 1);
    }
    EXPECT_EQ(engine->num_backwards(), static_cast<std::int64_t>(micro_steps.size()));
    if (agrees) {
      EXPECT_NO_THROW(engine->agree());
    } else {
      EXPECT_THROW(engine->agree(), core::InvalidArgument);
      EXPECT_NO_THROW(engine->agree());  // said once; the next step may do better
    }
  });
}

// FSDP2 adds what no_sync keeps between nodes place by place.
TEST(HostSums, AreRefusedWhereMicroStepsUnderNoSyncUsedOtherHostUnits) {
  const std::vector<Units> other{{0, 1}, {0, 2}};
  expect_agreement({2, 1}, other, /*no_sync=*/true, /*agrees=*/false);
  expect_agreement({2, 1}, {{1, 2}, {1, 2}, {1}}, true, false);
  expect_agreement({2, 1}, other, /*no_sync=*/false, true);
  expect_agreement({2, 1}, {{0, 1}, {1}, {0, 1}}, true, true);  // unit 0 is not the host's
  expect_agreement({2, 1}, {{1}, {1, 2}, {1, 2}}, false, true);
  expect_agreement({1, 2}, other, true, true);  // nothing is between nodes
}

// A rank alone, given a plan that does not fit.
void make_alone(const plan::Plan& plan) {
  const wire::Group alone(nullptr, "row", 0, 1);
  const std::vector<UnitSpec> units{{"unit", at::kFloat, at::kFloat}};
  const Engine engine(EngineOptions{}, {{alone, alone}, {alone, alone}, alone}, plan, units);
}

TEST(Engine, RefusesAPlanOfAnotherMeshOrUnit) {
  const auto plan = [](int unit, Mesh mesh) {
    const layout::Parameters parameters{{{"", {1, 2, 2}, unit}, core::Slot(0)}};
    return plan_of(parameters, mesh);
  };
  EXPECT_NO_THROW(make_alone(plan(0, {1, 1})));
  EXPECT_THROW(make_alone(plan(1, {1, 1})), core::InternalError);
  EXPECT_THROW(make_alone(plan(0, {1, 2})), core::InternalError);
}

TEST(Engine, RefusesABatchOfWhatItDoesNotOwn) {
  const layout::Parameters parameters{{{"", {1, 2, 2}, 0}, core::Slot(1)}};
  plan::Plan plan = plan_of(parameters, {1, 1});
  plan.batches[0].owner = core::Owner(0);
  EXPECT_THROW(make_alone(plan), core::InternalError);
}

}  // namespace
}  // namespace dmuon::engine
