#include "dmuon/wire/arrival.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "dmuon/core/error.h"
#include "tests/wire/groups.h"

namespace dmuon::wire {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr layout::Mesh kTwo{1, 2};

// Rank 0 sends so late that rank 1 would read zeros if it did not wait.
TEST(AwaitArrival, ReturnsAfterAllMessagesHaveArrived) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    SharedMesh mesh = make_mesh(kTwo, store, rank);
    at::Tensor first = rank == 0 ? at::ones({3}) : at::zeros({3});
    at::Tensor second = first.clone();
    std::vector<Pending> messages;
    messages.push_back(mesh.row().broadcast(first, 0, "the first"));
    if (rank == 0) std::this_thread::sleep_for(milliseconds(300));
    messages.push_back(mesh.row().broadcast(second, 0, "the second"));
    await_arrival(&mesh, c10::kCPU, std::move(messages), "both");
    EXPECT_TRUE(first.equal(at::ones({3})) && second.equal(at::ones({3}))) << "rank " << rank;
    EXPECT_EQ(mesh.watch->num_operations(), 1);
  });
}

// Ranks without a message of their own count it too: all ranks number operations alike.
TEST(AwaitArrival, IsAnOperationAlsoWithoutMessages) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    SharedMesh mesh = make_mesh(kTwo, store, rank);
    await_arrival(&mesh, c10::kCPU, {}, "nothing");
    EXPECT_EQ(mesh.watch->num_operations(), 1);
  });
}

// Rank 1 sends nothing, and comes to no arrival.
TEST(AwaitArrival, RaisesWithinSecondsIfARankIsOver) {
  const auto start = steady_clock::now();
  run_ranks(2, [](int rank, const StorePtr& store) {
    SharedMesh mesh = make_mesh(kTwo, store, rank);
    if (rank == 1) {
      mesh.watch->over("its program has ended");
      while (store->add("raised", 0) == 0) std::this_thread::sleep_for(milliseconds(1));
      return;
    }
    try {
      std::vector<Pending> messages{mesh.row().broadcast(at::zeros({3}), 1, "a broadcast")};
      await_arrival(&mesh, c10::kCPU, std::move(messages), "an arrival");
      ADD_FAILURE() << "it arrived";
    } catch (const core::CommError& error) {
      const std::string why = error.what();
      EXPECT_NE(why.find("in vain"), std::string::npos) << why;
      EXPECT_NE(why.find("waits for an arrival"), std::string::npos) << why;
      EXPECT_NE(why.find("its program has ended"), std::string::npos) << why;
    }
    store->add("raised", 1);
  });
  EXPECT_LT(steady_clock::now() - start, kTimeout * 8 / 10);
}

}  // namespace
}  // namespace dmuon::wire
