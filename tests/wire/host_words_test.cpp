#include "dmuon/wire/host_words.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "tests/wire/groups.h"

namespace dmuon::wire {
namespace {

constexpr auto kAgreement = watch::Rendezvous::kAgreement;
constexpr auto kComparison = watch::Rendezvous::kComparison;

class HostWordsTest : public testing::TestWithParam<layout::Mesh> {
 protected:
  void run(const std::function<void(int rank, SharedMesh& mesh)>& body) {
    run_ranks(GetParam().num_slots(), [&](int rank, const StorePtr& store) {
      SharedMesh mesh = make_mesh(GetParam(), store, rank);
      body(rank, mesh);
      mesh.words.all_gather({}, kComparison, "the end");  // who leaves first breaks connections
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Meshes, HostWordsTest,
                         testing::Values(layout::Mesh{1, 1}, layout::Mesh{1, 3}, layout::Mesh{3, 1},
                                         layout::Mesh{2, 3}));

TEST_P(HostWordsTest, TakeTheLargestOfEachElementOverAllRanks) {
  run([&](int rank, SharedMesh& mesh) {
    const int size = GetParam().num_slots();
    const at::Tensor tensor = at::zeros({size + 1}, at::TensorOptions().dtype(at::kDouble));
    tensor[rank] = 1 + rank;
    tensor[size] = -rank;
    mesh.words.all_reduce_max(tensor, kAgreement, "x");
    for (int other = 0; other < size; ++other) EXPECT_EQ(tensor[other].item<double>(), 1 + other);
    EXPECT_EQ(tensor[size].item<double>(), 0);
  });
}

TEST_P(HostWordsTest, GatherEachRanksWordsBySlot) {
  run([&](int rank, SharedMesh& mesh) {
    const auto all =
        mesh.words.all_gather({rank, -1, std::int64_t{1} << 60, rank * rank}, kComparison, "x");
    ASSERT_EQ(std::ssize(all), GetParam().num_slots());
    for (std::int64_t slot = 0; slot < std::ssize(all); ++slot) {
      const auto& words = all[static_cast<std::size_t>(slot)];
      EXPECT_EQ(words, (std::array{slot, std::int64_t{-1}, std::int64_t{1} << 60, slot * slot}));
    }
  });
}

// Ranks of another row have exchanged their words already, and wait for the column.
TEST(HostWords, RaiseOnAllRanksIfOneIsOver) {
  run_ranks(4, [](int rank, const StorePtr& store) {
    SharedMesh mesh = make_mesh({2, 2}, store, rank);
    const auto start = std::chrono::steady_clock::now();
    if (rank == 3) {
      mesh.watch->over("it has had enough");
    } else {
      EXPECT_THROW(mesh.words.all_reduce_max(at::zeros({1}), kAgreement, "x"), core::CommError);
      EXPECT_LT(std::chrono::steady_clock::now() - start, kTimeout * 8 / 10);
    }
    store->add("raised", 1);
    while (store->add("raised", 0) < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

}  // namespace
}  // namespace dmuon::wire
