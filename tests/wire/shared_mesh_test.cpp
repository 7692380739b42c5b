#include "dmuon/wire/shared_mesh.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dmuon/core/error.h"
#include "tests/wire/groups.h"

namespace dmuon::wire {
namespace {

TEST(Turn, EndsWhatTheHolderBeforeLeftOpen) {
  Turn turn;
  std::vector<int> ended;
  int first = 0;
  int second = 0;
  const auto take_first = [&] { turn.take(&first, [&] { ended.push_back(1); }); };
  const auto take_second = [&] { turn.take(&second, [&] { ended.push_back(2); }); };
  take_first();
  take_first();
  EXPECT_EQ(ended, (std::vector<int>{}));
  take_second();
  take_second();
  EXPECT_EQ(ended, (std::vector<int>{1}));
  take_first();
  EXPECT_EQ(ended, (std::vector<int>{1, 2}));
}

TEST(Turn, AsksNothingOfAHolderThatGaveItUp) {
  Turn turn;
  std::vector<int> ended;
  int first = 0;
  int second = 0;
  turn.take(&first, [&] { ended.push_back(1); });
  turn.give_up(&second);  // has no turn
  turn.take(&second, [&] { ended.push_back(2); });
  EXPECT_EQ(ended, (std::vector<int>{1}));
  turn.give_up(&second);
  turn.take(&first, [&] { ended.push_back(1); });
  EXPECT_EQ(ended, (std::vector<int>{1}));
}

TEST(Turn, KeepsItsHolderUntilAnotherHasTakenIt) {
  Turn turn;
  std::vector<int> ended;
  auto first = std::make_shared<int>(1);
  auto second = std::make_shared<int>(2);
  const std::weak_ptr<int> first_lives = first;
  const std::weak_ptr<int> second_lives = second;
  turn.take(first.get(), [&, it = first.get()] { ended.push_back(*it); });
  const void* const holder = first.get();
  turn.keep(holder, std::move(first));
  turn.keep(second.get(), second);  // has no turn
  EXPECT_FALSE(first_lives.expired());
  turn.take(second.get(), [] {});
  EXPECT_EQ(ended, (std::vector<int>{1}));
  EXPECT_TRUE(first_lives.expired());
  second.reset();
  EXPECT_TRUE(second_lives.expired());
}

TEST(SharedMesh, KnowsItsPlace) {
  run_ranks(6, [](int rank, const StorePtr& store) {  // 2 x 3
    SharedMesh mesh = make_mesh({2, 3}, store, rank);
    EXPECT_EQ(mesh.shape().num_replicates, 2);
    EXPECT_EQ(mesh.shape().num_shards, 3);
    EXPECT_TRUE(mesh.has_inter());
    EXPECT_EQ(mesh.slot(), core::Slot(rank));
    mesh.words.all_gather({}, watch::Rendezvous::kComparison,
                          "the end");  // who leaves first would break the others' connections
    EXPECT_EQ(mesh.shard(), core::Shard(rank % 3));
  });
}

TEST(SharedMesh, SharesLanesAndTurnWithItsCopies) {
  const Group alone(nullptr, "row", 0, 1);
  const SharedMesh mesh{{alone, alone}, {alone, alone}, alone};
  const SharedMesh copy = mesh;
  EXPECT_EQ(copy.lanes, mesh.lanes);
  EXPECT_EQ(copy.turn, mesh.turn);
}

TEST(OnDevice, KnowsTheOldestOperationThatHasNotHappened) {
  OnDevice on_device;
  EXPECT_FALSE(on_device.oldest().has_value());
  Lane lane("test");
  std::promise<void> release;
  on_device.add({1, "a"}, Event(), c10::kCPU);
  Event second = lane.enqueue(c10::kCPU, [&] { release.get_future().wait(); }, {});
  on_device.add({2, "b"}, second, c10::kCPU);
  on_device.add({3, "c"}, Event(), c10::kCPU);
  ASSERT_TRUE(on_device.oldest().has_value());
  EXPECT_EQ(on_device.oldest()->number, 2);
  EXPECT_EQ(on_device.oldest()->what, "b");
  release.set_value();
  second.wait();
  EXPECT_FALSE(on_device.oldest().has_value());
}

// A rank that fails does not wait for its peers' timeouts: what hangs is given up.
TEST(SharedMesh, LeavesWhatDoesNotHappenInTime) {
  const auto start = std::chrono::steady_clock::now();
  run_ranks(2, [](int rank, const StorePtr& store) {
    const Group alone(nullptr, "column", 0, 1);
    SharedMesh mesh{{make_group(store, "row", rank, 2), alone}, {alone, alone}, alone};
    if (rank == 1) return;
    Event received = (*mesh.lanes)[schedule::Lane::kIntra].enqueue(
        c10::kCPU, [&mesh] { mesh.row().receive(at::ones({1000}), 1, "what nobody sends").wait(); },
        {});
    EXPECT_EQ(mesh.leave(std::chrono::milliseconds(50)), "");
    mesh.watch->over_after(0, 0, "the update has failed");
    EXPECT_EQ(mesh.leave(std::chrono::milliseconds(0)), "the update has failed");
    EXPECT_THROW(received.wait(), core::CommError);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, kTimeout);
}

// A backend's group waits, when it is freed, for what is in flight: a process could not end.
TEST(SharedMesh, IsFreedAtOnceAfterAWaitInVain) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    auto mesh = std::make_unique<SharedMesh>(make_mesh({1, 2}, store, rank));
    const auto start = std::chrono::steady_clock::now();
    if (rank == 1) {
      mesh->watch->over("it has had enough");
      while (store->add("freed", 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
      EXPECT_THROW(
          mesh->words.all_reduce_max(at::ones({1}), watch::Rendezvous::kAgreement, "words"),
          core::CommError);
      mesh.reset();
      EXPECT_LT(std::chrono::steady_clock::now() - start, kTimeout * 8 / 10);
      store->add("freed", 1);
    }
  });
}

}  // namespace
}  // namespace dmuon::wire
