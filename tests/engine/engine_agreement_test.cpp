// What the engine brings to the agreement of a step, and how long it keeps the verdict.

#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

constexpr ParameterIndex kRouted(5);
constexpr LeafIndex kRoutedLeaf(5);

// Of every rank, the gradient of one parameter, all elements equal, is routed.
void route_constant(Engine& engine, double value) {
  engine.put_gradient(kRoutedLeaf, at::full(engine.parameters()[kRouted].view.sizes(), value));
  engine.route(UnitIndex(1));
}

// Of gradients that every rank holds alike.
at::Tensor host_squares(double replicated) {
  at::Tensor squares = at::zeros({2}, at::TensorOptions().dtype(at::kDouble));
  squares[1] = replicated;
  return squares;
}

class EngineAgreement : public testing::TestWithParam<Mesh> {};

TEST_P(EngineAgreement, TellsEveryRankTheNormsOfMeans) {
  const Setting setting = setting_on(GetParam());
  const int size = setting.mesh.num_slots();
  wire::run_ranks(size, [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    route_constant(*engine, rank);
    const Verdict verdict = engine->agree();
    const double mean = (size - 1) / 2.0;
    EXPECT_TRUE(verdict.finite().item<bool>());
    const at::Tensor norms = verdict.norms();
    for (const ParameterIndex parameter : verdict.has_gradient.indices()) {
      const double expected = parameter == kRouted ? 6 * mean : 0;
      EXPECT_NEAR(norms[parameter.value()].item<double>(), expected, 1e-5 * expected);
      EXPECT_EQ(verdict.has_gradient[parameter], parameter == kRouted);
    }
  });
}

TEST_P(EngineAgreement, FindsTheLargestOfNumbersThatRanksBring) {
  const Setting setting = setting_on(GetParam());
  const int size = setting.mesh.num_slots();
  wire::run_ranks(size, [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    engine->set_num_maxima(2);
    route_constant(*engine, rank);
    const at::Tensor brought = at::tensor({-1. - rank, 1. * rank}, at::kDouble);
    const Verdict verdict = engine->agree({}, 0, brought);
    EXPECT_TRUE(verdict.maxima.equal(at::tensor({-1., size - 1.}, at::kDouble)));
    EXPECT_NEAR(verdict.norm().item<double>(), 3. * (size - 1), 1e-5);
    engine->scale_gradients(at::scalar_tensor(0.5));
    EXPECT_TRUE(engine->verdict()->maxima.equal(verdict.maxima));
  });
}

TEST_P(EngineAgreement, KnowsAGradientThatOneRankAloneHad) {
  const Setting setting = setting_on(GetParam());
  const int size = setting.mesh.num_slots();
  wire::run_ranks(size, [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    const ParameterIndex third(3);
    if (rank == size - 1)
      engine->put_gradient(LeafIndex(3), integers(setting.parameters[third], 0));
    engine->route(UnitIndex(0));
    const Verdict verdict = engine->agree();
    EXPECT_TRUE(verdict.has_gradient[third]);
    EXPECT_FALSE(verdict.has_gradient[ParameterIndex(0)]);
  });
}

TEST_P(EngineAgreement, ForgetsAClearedGradient) {
  const Setting setting = setting_on(GetParam());
  wire::run_ranks(setting.mesh.num_slots(), [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    route_constant(*engine, 1);
    EXPECT_TRUE(engine->agree().has_gradient[kRouted]);
    engine->clear_gradient(kRoutedLeaf);
    EXPECT_EQ(engine->verdict(), nullptr);
    const Verdict verdict = engine->agree();
    EXPECT_FALSE(verdict.has_gradient[kRouted]);
    EXPECT_EQ(verdict.norm().item<double>(), 0);
  });
}

TEST_P(EngineAgreement, KnowsAGradientThatWasSetToZero) {
  const Setting setting = setting_on(GetParam());
  wire::run_ranks(setting.mesh.num_slots(), [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    route_constant(*engine, std::numeric_limits<double>::quiet_NaN());
    EXPECT_FALSE(engine->agree().finite().item<bool>());
    engine->zero_gradient(kRoutedLeaf);
    EXPECT_EQ(engine->verdict(), nullptr);
    const Verdict verdict = engine->agree();
    EXPECT_TRUE(verdict.has_gradient[kRouted]);
    EXPECT_EQ(verdict.norm().item<double>(), 0);
    engine->zero_gradient(LeafIndex(0));
    EXPECT_FALSE(engine->agree().has_gradient[ParameterIndex(0)]);
  });
}

TEST_P(EngineAgreement, IsKeptUntilGradientsChange) {
  const Setting setting = setting_on(GetParam());
  wire::run_ranks(setting.mesh.num_slots(), [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    EXPECT_EQ(engine->agree(host_squares(4)).norm().item<double>(), 2);
    EXPECT_EQ(engine->verdict()->norm().item<double>(), 2);
    engine->scale_gradients(at::scalar_tensor(0.5));
    EXPECT_EQ(engine->verdict()->norm().item<double>(), 1);
    engine->end_step();
    EXPECT_EQ(engine->verdict(), nullptr);
  });
}

// The unit is there from the forward before, so that one more communicates nothing: only the hash
// tells.
TEST_P(EngineAgreement, RaisesOnEveryRankWhereOneIssuedMoreThanTheOthers) {
  const Setting setting = setting_on(GetParam());
  const int size = setting.mesh.num_slots();
  if (size == 1) return;
  wire::run_ranks(size, [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    const auto forward = [&] {
      engine->begin_forward();
      engine->before_forward(UnitIndex(1));
      engine->after_forward(UnitIndex(1));
    };
    forward();
    forward();
    EXPECT_NO_THROW(engine->agree());
    engine->end_step();
    if (rank == size - 1) forward();
    EXPECT_THROW(engine->agree(), core::InvalidArgument);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, EngineAgreement,
                         testing::Values(Mesh{1, 1}, Mesh{1, 2}, Mesh{2, 2}, Mesh{1, 3},
                                         Mesh{3, 1}),
                         [](const auto& given) { return mesh_name(given.param); });

}  // namespace
}  // namespace dmuon::engine
