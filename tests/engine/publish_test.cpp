// Publication: after an unshard every rank has the owners' weights.

#include <gtest/gtest.h>

#include "dmuon/engine/engine.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

const Mesh kMeshes[] = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {1, 3}, {3, 1}, {1, 5}, {5, 1}};
constexpr int kNumUnits = 3;

class Publish : public testing::TestWithParam<std::tuple<Mesh, at::ScalarType, bool>> {
 protected:
  Publish() {
    setting_.mesh = std::get<0>(GetParam());
    setting_.specs = unbalanced_specs(setting_.mesh);
    setting_.compute_dtype = std::get<1>(GetParam());
    setting_.node_copy = std::get<2>(GetParam());
  }

  void expect_weights(Engine& engine, int index, int seed) {
    Unit& unit = engine.unit(index);
    for (std::size_t i = 0; i < unit.packing().matrices.size(); ++i) {
      const int matrix = unit.packing().matrices[i];
      const MatrixSpec& spec = engine.specs()[static_cast<std::size_t>(matrix)];
      EXPECT_TRUE(same_values(weight_at(engine, index, i), integers(spec, seed + matrix)))
          << "matrix " << matrix;
    }
  }

  Setting setting_;
};

TEST_P(Publish, GivesEveryRankTheOwnersWeights) {
  run_ranks(setting_.mesh.size(), [this](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    set_masters(*engine, 1);
    engine->publish();
    for (const int unit : {0, 1, 2, 1, 0}) {
      engine->unshard(unit);
      expect_weights(*engine, unit, 1);
      engine->reshard(unit);
    }
  });
}

TEST_P(Publish, ShowsNewWeightsFromTheNextVersionOn) {
  run_ranks(setting_.mesh.size(), [this](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    set_masters(*engine, 1);
    engine->publish();
    for (int unit = 0; unit < kNumUnits; ++unit) engine->unshard(unit);
    set_masters(*engine, 50);
    engine->publish();  // frees what is live
    for (int unit = 0; unit < kNumUnits; ++unit) {
      EXPECT_FALSE(engine->ready(unit));
      engine->unshard(unit);
      expect_weights(*engine, unit, 50);
    }
  });
}

// Stage 2: one broadcast a non-empty column at every unshard. Stage 1: one a non-empty part, once a
// version with node copies and at every unshard without.
TEST_P(Publish, SendsEachPartOnce) {
  run_ranks(setting_.mesh.size(), [this](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    const Mesh mesh = setting_.mesh;
    const auto shard = static_cast<std::size_t>(rank % mesh.num_shards);
    const auto element = static_cast<std::int64_t>(c10::elementSize(setting_.compute_dtype));
    constexpr int kNumUnshards = 3;
    set_masters(*engine, 1);
    engine->publish();
    double intra = 0;
    double inter = 0;
    double intra_bytes = 0;
    double inter_bytes = 0;
    for (int index = 0; index < kNumUnits; ++index) {
      Unit& unit = engine->unit(index);
      const std::int64_t column = unit.packing().columns[shard].size();
      const std::int64_t part = unit.packing().owners[static_cast<std::size_t>(rank)].size();
      const int stage_1 = setting_.node_copy ? 1 : kNumUnshards;
      if (mesh.num_shards > 1 && column > 0) {
        intra += kNumUnshards;
        intra_bytes += static_cast<double>(kNumUnshards * column * element);
      }
      if (mesh.num_replicates > 1 && part > 0) {
        inter += stage_1;
        inter_bytes += static_cast<double>(stage_1 * part * element);
      }
      for (int i = 0; i < kNumUnshards; ++i) {
        engine->unshard(index);
        engine->unshard(index);  // live already
        engine->reshard(index);
      }
    }
    const auto statistics = engine->statistics();
    EXPECT_EQ(statistics.at("unshards"), kNumUnshards * kNumUnits);
    EXPECT_EQ(statistics.at("messages_intra"), intra);
    EXPECT_EQ(statistics.at("messages_inter"), inter);
    EXPECT_EQ(statistics.at("bytes_sent_intra"), intra_bytes);
    EXPECT_EQ(statistics.at("bytes_sent_inter"), inter_bytes);
  });
}

TEST_P(Publish, CollectsAMasterInFp32OnEveryRank) {
  run_ranks(setting_.mesh.size(), [this](int rank, const StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    set_masters(*engine, 1);
    for (OwnedBatch& batch : engine->batches()) batch.master.add_(0.001);  // not exact in bf16
    for (int matrix = 0; matrix < static_cast<int>(setting_.specs.size()); ++matrix) {
      const MatrixSpec& spec = setting_.specs[static_cast<std::size_t>(matrix)];
      EXPECT_TRUE(
          same_values(engine->collect_master(matrix), integers(spec, 1 + matrix).add_(0.001)));
    }
  });
}

std::string name_of(const testing::TestParamInfo<Publish::ParamType>& given) {
  const auto& [mesh, dtype, node_copy] = given.param;
  return name_of(mesh) + (dtype == at::kFloat ? "Float" : "Bfloat16") +
         (node_copy ? "NodeCopy" : "");
}

INSTANTIATE_TEST_SUITE_P(Meshes, Publish,
                         testing::Combine(testing::ValuesIn(kMeshes),
                                          testing::Values(at::kFloat, at::kBFloat16),
                                          testing::Bool()),
                         [](const auto& given) { return name_of(given); });

}  // namespace
}  // namespace dmuon::engine
