// Publication: after an unshard every rank has the owners' weights.

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

class Publish : public testing::TestWithParam<std::tuple<Mesh, at::ScalarType, bool>> {
 protected:
  Publish() {
    setting_ = setting_on(std::get<0>(GetParam()));
    setting_.compute_dtype = std::get<1>(GetParam());
    setting_.step.node_copy = std::get<2>(GetParam());
  }

  void expect_weights(Engine& engine, UnitIndex unit, int seed) {
    for (const ParameterIndex parameter : parameters_of(engine.parameters(), unit)) {
      const at::Tensor expected =
          integers(engine.parameters()[parameter], seed + parameter.value());
      EXPECT_TRUE(same_values(weight_of(engine, parameter), expected)) << "parameter " << parameter;
    }
  }

  Setting setting_;
};

TEST_P(Publish, GivesEveryRankTheOwnersWeights) {
  wire::run_ranks(setting_.mesh.num_slots(), [this](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    set_masters(*engine, 1);
    engine->publish();
    for (const int index : {0, 1, 2, 1, 0}) {
      const UnitIndex unit(index);
      engine->unshard(unit);
      expect_weights(*engine, unit, 1);
      engine->reshard(unit);
    }
  });
}

TEST_P(Publish, ShowsNewWeightsFromTheNextVersionOn) {
  wire::run_ranks(setting_.mesh.num_slots(), [this](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    set_masters(*engine, 1);
    engine->publish();
    for (const UnitIndex unit : kUnits) engine->unshard(unit);
    set_masters(*engine, 50);
    engine->publish();  // frees what is live
    for (const UnitIndex unit : kUnits) {
      EXPECT_FALSE(engine->ready(unit));
      engine->unshard(unit);
      expect_weights(*engine, unit, 50);
    }
  });
}

// Stage 2: one broadcast a non-empty column at every unshard. Stage 1: one a non-empty part, once a
// version with node copies and at every unshard without.
TEST_P(Publish, SendsEachPartOnce) {
  wire::run_ranks(setting_.mesh.num_slots(), [this](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    const Mesh mesh = setting_.mesh;
    const auto element = static_cast<std::int64_t>(c10::elementSize(setting_.compute_dtype));
    constexpr int kNumUnshards = 3;
    set_masters(*engine, 1);
    engine->publish();
    double intra = 0;
    double inter = 0;
    double intra_bytes = 0;
    double inter_bytes = 0;
    for (const UnitIndex unit : kUnits) {
      const layout::Packing& packing = engine->unit(unit).packing();
      const layout::Part& column = packing.columns[core::Shard(rank % mesh.num_shards)];
      const layout::Part& part = packing.owners[core::Slot(rank)];
      const int stage_1 = setting_.step.node_copy ? 1 : kNumUnshards;
      if (mesh.num_shards > 1) {
        intra += kNumUnshards * static_cast<double>(column.segments.size());
        intra_bytes += static_cast<double>(kNumUnshards * column.size() * element);
      }
      if (mesh.num_replicates > 1 && part.size() > 0) {  // one of a node copy
        inter += setting_.step.node_copy ? 1 : stage_1 * static_cast<double>(part.segments.size());
        inter_bytes += static_cast<double>(stage_1 * part.size() * element);
      }
      for (int i = 0; i < kNumUnshards; ++i) {
        engine->unshard(unit);
        engine->unshard(unit);  // live already
        engine->reshard(unit);
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

std::string case_name(const testing::TestParamInfo<Publish::ParamType>& given) {
  const auto& [mesh, dtype, node_copy] = given.param;
  return mesh_name(mesh) + (dtype == at::kFloat ? "Float" : "Bfloat16") +
         (node_copy ? "NodeCopy" : "");
}

INSTANTIATE_TEST_SUITE_P(Meshes, Publish,
                         testing::Combine(testing::ValuesIn(kMeshes),
                                          testing::Values(at::kFloat, at::kBFloat16),
                                          testing::Bool()),
                         [](const auto& given) { return case_name(given); });

}  // namespace
}  // namespace dmuon::engine
