// The agreement of a step: equal on all ranks, whatever each of them holds.

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Setting setting_on(Mesh mesh) {
  Setting setting;
  setting.mesh = mesh;
  setting.specs = unbalanced_specs(mesh);
  return setting;
}

// Of every rank, the gradient of matrix 5, all elements equal, is routed.
void route_constant(Engine& engine, double value) {
  const MatrixSpec& spec = engine.specs()[5];
  engine.put_gradient(1, 5, at::full({spec.rows, spec.cols}, value));
  engine.route(1);
}

class Agreement : public testing::TestWithParam<Mesh> {};

TEST_P(Agreement, TellsEveryRankTheSquaredNormsOfMeans) {
  const Setting setting = setting_on(GetParam());
  const int size = setting.mesh.size();
  run_ranks(size, [&](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    route_constant(*engine, rank);
    const Verdict verdict = engine->agree({});
    const double mean = (size - 1) / 2.0;
    EXPECT_TRUE(verdict.finite);
    for (std::size_t matrix = 0; matrix < setting.specs.size(); ++matrix) {
      const double expected = matrix == 5 ? 36 * mean * mean : 0;
      EXPECT_NEAR(verdict.squared_norms[matrix], expected, 1e-5 * expected);
      EXPECT_EQ(verdict.has_gradient[matrix], matrix == 5);
    }
  });
}

TEST_P(Agreement, KnowsAGradientThatOneRankAloneHad) {
  const Setting setting = setting_on(GetParam());
  const int size = setting.mesh.size();
  run_ranks(size, [&](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    if (rank == size - 1) engine->put_gradient(0, 3, integers(setting.specs[3], 0));
    engine->route(0);
    const Verdict verdict = engine->agree({});
    EXPECT_TRUE(verdict.has_gradient[3]);
    EXPECT_FALSE(verdict.has_gradient[0]);
  });
}

TEST_P(Agreement, ForgetsAClearedGradient) {
  const Setting setting = setting_on(GetParam());
  run_ranks(setting.mesh.size(), [&](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    route_constant(*engine, 1);
    EXPECT_TRUE(engine->agree({}).has_gradient[5]);
    engine->clear_gradient(5);
    EXPECT_FALSE(engine->agreed());
    const Verdict verdict = engine->agree({});
    EXPECT_FALSE(verdict.has_gradient[5]);
    EXPECT_EQ(verdict.squared_norms[5], 0);
  });
}

TEST_P(Agreement, StopsEveryRankAtOneRanksNanOrInfinity) {
  const Setting setting = setting_on(GetParam());
  const int last = setting.mesh.size() - 1;
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    run_ranks(setting.mesh.size(), [&](int rank, const StorePtr& store) {
      const auto engine = make_engine(setting, store, rank);
      route_constant(*engine, rank == last ? bad : 1);
      const Verdict verdict = engine->agree({});
      EXPECT_FALSE(verdict.finite);
      for (const double squared : verdict.squared_norms) EXPECT_TRUE(std::isfinite(squared));
      // The host's gradients count too, a sharded and a replicated one.
      engine->clear_gradient(5);
      EXPECT_FALSE(engine->agree({rank == last ? bad : 0, 0}).finite);
      engine->forget_verdict();
      EXPECT_FALSE(engine->agree({0, rank == 0 ? bad : 0}).finite);
      engine->forget_verdict();
      EXPECT_TRUE(engine->agree({}).finite);
    });
  }
}

// Replicas hold the same shards; what every rank holds alike counts once.
TEST_P(Agreement, CountsEachOfTheHostsGradientsOnce) {
  const Setting setting = setting_on(GetParam());
  const int num_shards = setting.mesh.num_shards;
  run_ranks(setting.mesh.size(), [&](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    const double sharded = std::pow(10, rank % num_shards);
    const double expected = (std::pow(10, num_shards) - 1) / 9 + 5e-9;
    EXPECT_DOUBLE_EQ(engine->agree({sharded, 5e-9}).host_squared_norm, expected);
  });
}

TEST_P(Agreement, IsKeptUntilGradientsChange) {
  const Setting setting = setting_on(GetParam());
  run_ranks(setting.mesh.size(), [&](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    EXPECT_EQ(engine->agree({0, 4}).host_squared_norm, 4);
    EXPECT_TRUE(engine->agreed());
    EXPECT_EQ(engine->agree({0, 9}).host_squared_norm, 4);
    engine->scale_verdict(0.5);
    EXPECT_EQ(engine->agree({0, 9}).host_squared_norm, 1);
    engine->forget_verdict();
    EXPECT_EQ(engine->agree({0, 9}).host_squared_norm, 9);
  });
}

// The unit is there from the forward before, so that one more communicates nothing: only the hash
// tells.
TEST_P(Agreement, RaisesOnEveryRankWhereOneIssuedMoreThanTheOthers) {
  const Setting setting = setting_on(GetParam());
  const int size = setting.mesh.size();
  if (size == 1) return;
  run_ranks(size, [&](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    const auto forward = [&] {
      engine->begin_forward();
      engine->before_forward(1);
      engine->after_forward(1);
    };
    forward();
    forward();
    EXPECT_NO_THROW(engine->agree({}));
    engine->forget_verdict();
    if (rank == size - 1) forward();
    EXPECT_THROW(engine->agree({}), core::InvalidArgument);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Agreement,
                         testing::Values(Mesh{1, 1}, Mesh{1, 2}, Mesh{2, 2}, Mesh{1, 3},
                                         Mesh{3, 1}),
                         [](const auto& given) { return name_of(given.param); });

}  // namespace
}  // namespace dmuon::engine
