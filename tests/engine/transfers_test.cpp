#include "dmuon/engine/transfers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "dmuon/core/error.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

const std::string kSecond = "second moment";
const std::string kRows = "one value a row";

class Transfer : public testing::TestWithParam<Mesh> {
 protected:
  // Calls `body(engine)` on each rank.
  template <typename Body>
  void on_each_rank(Body&& body) {
    wire::run_ranks(setting_.mesh.num_slots(), [&](int rank, const wire::StorePtr& store) {
      const auto engine = make_engine(setting_, store, rank);
      engine->owned().add(kSecond);
      engine->owned().add(kRows, [](const layout::View& view) {
        return std::vector<std::int64_t>{view.rows, 1};
      });
      body(*engine, rank);
    });
  }

  // Integers, not exact in bf16. kRows has the first column of each matrix.
  at::Tensor whole(const Engine& engine, LeafIndex leaf, const std::string& name) const {
    const int seed = name == wire::kMaster ? 1 : 2;
    const auto values = [&](ParameterIndex part) {
      return integers(setting_.parameters[part], seed + part.value()).add_(0.001);
    };
    if (name != kRows) return leaf_of(engine, leaf, values);
    std::vector<at::Tensor> columns;
    for (const ParameterIndex part : engine.leaves()[leaf].parameters)
      columns.push_back(values(part).narrow(-1, 0, 1));
    if (columns.size() == 1) return columns[0];
    for (at::Tensor& column : columns) column = column.reshape({-1});
    return at::cat(columns);
  }

  const Setting setting_ = setting_on(GetParam());
};

TEST_P(Transfer, GathersAnyOwnedTensorInFp32OnEveryRank) {
  on_each_rank([&](Engine& engine, int) {
    for (const std::string& name : {wire::kMaster, kSecond, kRows}) {
      for (const LeafIndex leaf : engine.leaves().indices())
        engine.transfers().scatter(leaf, name, whole(engine, leaf, name));
      for (const LeafIndex leaf : engine.leaves().indices())
        EXPECT_TRUE(same_values(engine.transfers().gather(leaf, name), whole(engine, leaf, name)))
            << name << " of leaf " << leaf;
    }
    // Before anything is sent: at ranks that own nothing, too.
    EXPECT_THROW(engine.transfers().gather(LeafIndex(0), "third moment"), core::InvalidArgument);
    for (const std::string& name : {wire::kMaster, kRows})
      EXPECT_THROW(engine.transfers().scatter(LeafIndex(0), name, at::ones({4})),
                   core::InvalidArgument);
  });
}

// Cut along the first dimension as torch.chunk does; then all owners take twice as much.
TEST_P(Transfer, GivesShardsOfOwnedTensorsAndTakesThem) {
  on_each_rank([&](Engine& engine, int rank) {
    const int num_shards = setting_.mesh.num_shards;
    std::vector<LeafIndex> all;
    for (const LeafIndex leaf : engine.leaves().indices()) all.push_back(leaf);
    for (const std::string& name : {wire::kMaster, kRows}) {
      if (name == kRows) all.pop_back();  // a flat leaf: nothing is known of its rows
      for (const LeafIndex leaf : all)
        engine.transfers().scatter(leaf, name, whole(engine, leaf, name));
      std::vector<at::Tensor> shards = engine.transfers().to_shards(all, name, at::kFloat);
      for (const LeafIndex leaf : all) {
        const at::Tensor expected = whole(engine, leaf, name);
        const std::int64_t rows = expected.size(0);
        const std::int64_t chunk = (rows + num_shards - 1) / num_shards;
        const std::int64_t begin = std::min(rows, chunk * (rank % num_shards));
        const at::Tensor own = expected.narrow(0, begin, std::min(rows - begin, chunk));
        EXPECT_TRUE(same_values(shards[leaf.position()], own.reshape({-1}))) << name << leaf;
      }
      for (at::Tensor& shard : shards) shard.mul_(2);
      engine.transfers().from_shards(all, name, shards);
      for (const LeafIndex leaf : all)
        EXPECT_TRUE(
            same_values(engine.transfers().gather(leaf, name), whole(engine, leaf, name).mul(2)))
            << name << " of leaf " << leaf;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Transfer, testing::ValuesIn(kMeshes),
                         [](const auto& given) { return mesh_name(given.param); });

// Rank 1 never comes: it calls something else.
TEST(TransferOfTwo, RaisesOnBothWithinSecondsIfOneNeverComes) {
  const auto start = std::chrono::steady_clock::now();
  const Setting setting = setting_on({1, 2});
  wire::run_ranks(2, [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    try {
      if (rank == 1) {
        engine->meet("state_dict");
      } else {
        ASSERT_EQ(setting.parameters[ParameterIndex(0)].owner.value(), 1);
        engine->transfers().gather(LeafIndex(0), wire::kMaster);
      }
      ADD_FAILURE() << "nothing was raised on rank " << rank;
    } catch (const core::CommError& error) {
      const std::string why = error.what();
      EXPECT_NE(why.find("waits for a whole master of leaf 0, inside nodes; rank 1 of the mesh "
                         "has issued 0 operations, and waits for state_dict in step 1"),
                std::string::npos)
          << why;
    }
    // No connection closes before both have raised.
    store->add("raised", 1);
    while (store->add("raised", 0) < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, wire::kTimeout * 8 / 10);
}

}  // namespace
}  // namespace dmuon::engine
