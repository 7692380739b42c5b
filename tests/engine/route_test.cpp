// Routing: after it the owner, and nobody else, has the mean of all ranks' gradients.

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

const Mesh kMeshes[] = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {1, 3}, {3, 1}, {1, 5}, {5, 1}};
constexpr int kNumUnits = 3;

// Small integers times the number of ranks: their means, a node's and the mesh's, are exact in
// bf16.
at::Tensor gradient_of(const Setting& setting, int rank, int matrix) {
  const MatrixSpec& spec = setting.specs[static_cast<std::size_t>(matrix)];
  return integers(spec, matrix).fmod_(7).add_(rank).mul_(setting.mesh.size());
}

at::Tensor mean_of(const Setting& setting, int matrix) {
  const MatrixSpec& spec = setting.specs[static_cast<std::size_t>(matrix)];
  const int size = setting.mesh.size();
  // The mean of rank + x over ranks, times their number.
  return integers(spec, matrix).fmod_(7).mul_(size).add_(size * (size - 1) / 2);
}

class Route : public testing::TestWithParam<std::tuple<Mesh, at::ScalarType>> {
 protected:
  Route() {
    setting_.mesh = std::get<0>(GetParam());
    setting_.specs = unbalanced_specs(setting_.mesh);
    setting_.reduce_dtype = std::get<1>(GetParam());
  }

  void put_and_route(Engine& engine, int rank) {
    for (int unit = 0; unit < kNumUnits; ++unit) {
      for (const int matrix : matrices_of(setting_.specs, unit)) {
        engine.put_gradient(unit, matrix, gradient_of(setting_, rank, matrix));
      }
      engine.route(unit);
    }
  }

  int num_matrices() const { return static_cast<int>(setting_.specs.size()); }

  Setting setting_;
};

TEST_P(Route, GivesTheOwnerTheMean) {
  run_ranks(setting_.mesh.size(), [this](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    put_and_route(*engine, rank);
    for (int matrix = 0; matrix < num_matrices(); ++matrix) {
      const bool owner = setting_.specs[static_cast<std::size_t>(matrix)].owner == rank;
      const at::Tensor gradient = owned_gradient(*engine, matrix);
      EXPECT_EQ(gradient.defined(), owner);
      if (!owner) continue;
      const at::Tensor expected = mean_of(setting_, matrix);
      // 1/3 and 1/5 have no exact fp32: such a mean is within its last bits.
      EXPECT_LE(gradient.sub(expected).abs().max().item<float>(),
                setting_.mesh.size() % 2 == 0 || setting_.mesh.size() == 1 ? 0.0F : 8e-6F)
          << "matrix " << matrix;
    }
  });
}

TEST_P(Route, AddsMicroStepsAndClearedGradientsStartAfresh) {
  run_ranks(setting_.mesh.size(), [this](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    put_and_route(*engine, rank);
    put_and_route(*engine, rank);
    engine->clear_gradient(0);
    EXPECT_FALSE(owned_gradient(*engine, 0).defined());
    put_and_route(*engine, rank);
    for (int matrix = 0; matrix < num_matrices(); ++matrix) {
      const at::Tensor gradient = owned_gradient(*engine, matrix);
      if (!gradient.defined()) continue;
      const at::Tensor expected = mean_of(setting_, matrix).mul(matrix == 0 ? 1 : 3);
      EXPECT_LE(gradient.sub(expected).abs().max().item<float>(), 2e-5F) << "matrix " << matrix;
    }
  });
}

// A mean counts ranks without a gradient as zeros.
TEST_P(Route, CountsRanksWithoutAGradientAsZeros) {
  run_ranks(setting_.mesh.size(), [this](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    const int giver = setting_.mesh.size() - 1;
    for (int unit = 0; unit < kNumUnits; ++unit) {
      const int matrix = matrices_of(setting_.specs, unit)[0];
      if (rank == giver) {
        engine->put_gradient(unit, matrix, gradient_of(setting_, giver, matrix));
      }
      engine->route(unit);
    }
    for (int unit = 0; unit < kNumUnits; ++unit) {
      for (const int matrix : matrices_of(setting_.specs, unit)) {
        const at::Tensor gradient = owned_gradient(*engine, matrix);
        if (!gradient.defined()) continue;
        const bool given = matrix == matrices_of(setting_.specs, unit)[0];
        const at::Tensor expected =
            gradient_of(setting_, giver, matrix).mul(given ? 1.0 / setting_.mesh.size() : 0.0);
        EXPECT_LE(gradient.sub(expected).abs().max().item<float>(), 2e-6F) << "matrix " << matrix;
      }
    }
  });
}

// Of each unit a rank sends every other column's part, then every other owner's part of its own
// column.
TEST_P(Route, SendsEachPartOnce) {
  run_ranks(setting_.mesh.size(), [this](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    put_and_route(*engine, rank);
    const int shard = rank % setting_.mesh.num_shards;
    double intra = 0;
    double inter = 0;
    double bytes_intra = 0;
    double bytes_inter = 0;
    for (int index = 0; index < kNumUnits; ++index) {
      const Packing& packing = engine->unit(index).packing();
      for (int column = 0; column < setting_.mesh.num_shards; ++column) {
        const auto size = packing.columns[static_cast<std::size_t>(column)].size();
        if (column == shard || size == 0) continue;
        intra += pieces_of(size, packing.num_elements, setting_.mesh.num_shards - 1);
        bytes_intra += static_cast<double>(size);
      }
      for (int slot = shard; slot < setting_.mesh.size(); slot += setting_.mesh.num_shards) {
        const auto size = packing.owners[static_cast<std::size_t>(slot)].size();
        if (slot == rank || size == 0) continue;
        inter += pieces_of(size, packing.columns[static_cast<std::size_t>(shard)].size(),
                           setting_.mesh.num_replicates - 1);
        bytes_inter += static_cast<double>(size);
      }
    }
    const auto element = static_cast<double>(c10::elementSize(setting_.reduce_dtype));
    const auto statistics = engine->statistics();
    EXPECT_EQ(statistics.at("routes"), kNumUnits);
    EXPECT_EQ(statistics.at("messages_intra"), intra);
    EXPECT_EQ(statistics.at("messages_inter"), inter);
    EXPECT_EQ(statistics.at("bytes_sent_intra"), bytes_intra * element);
    EXPECT_EQ(statistics.at("bytes_sent_inter"), bytes_inter * element);
  });
}

std::string name_of(const testing::TestParamInfo<Route::ParamType>& given) {
  const auto& [mesh, dtype] = given.param;
  return name_of(mesh) + (dtype == at::kFloat ? "Float" : "Bfloat16");
}

INSTANTIATE_TEST_SUITE_P(Meshes, Route,
                         testing::Combine(testing::ValuesIn(kMeshes),
                                          testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& given) { return name_of(given); });

TEST(RouteErrors, RefusesAMatrixOfAnotherUnit) {
  Setting setting;
  setting.mesh = {1, 1};
  setting.specs = unbalanced_specs(setting.mesh);
  run_ranks(1, [&](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    EXPECT_THROW(engine->put_gradient(0, 5, integers(setting.specs[5], 0)), core::InternalError);
  });
}

}  // namespace
}  // namespace dmuon::engine
