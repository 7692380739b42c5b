#include "dmuon/engine/watch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dmuon/core/error.h"
#include "dmuon/engine/lane.h"
#include "tests/engine/rank_threads.h"

namespace dmuon::engine {
namespace {

using std::chrono::milliseconds;
using What = Rendezvous;

constexpr milliseconds kInterval(20);

// What a rank does until it is told that it waits in vain, or ten seconds have passed.
std::string wait_for(Watch* watch, What what, std::int64_t number) {
  const Watch::Waiting waiting(watch, what, number, "number " + std::to_string(number));
  for (int i = 0; i < 1000; ++i) {
    try {
      waiting.check();
    } catch (const core::CommError& error) {
      return error.what();
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
  return "";
}

TEST(Watch, EndsADisagreementOnEveryRank) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    Watch watch(
        store, rank, 2, [] {}, kInterval);
    watch.reach(What::kOperation, "publish of 'a'");
    const std::string why =
        rank == 0 ? wait_for(&watch, What::kComparison, watch.reach(What::kComparison, "here"))
                  : wait_for(&watch, What::kOperation, watch.reach(What::kOperation, "route"));
    EXPECT_NE(why.find("in vain"), std::string::npos) << "rank " << rank;
    watch.over(why);
    // Both have looked before either goes.
    store->add("done", 1);
    while (store->add("done", 0) < 2) std::this_thread::sleep_for(milliseconds(1));
  });
}

TEST(Watch, TellsThatARankIsOver) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    Watch watch(
        store, rank, 2, [] {}, kInterval);
    if (rank == 1) {
      watch.over("it has had enough");
    } else {
      const std::string why = wait_for(&watch, What::kAgreement, watch.reach(What::kAgreement, ""));
      EXPECT_NE(why.find("it has had enough"), std::string::npos) << why;
    }
    store->add("done", 1);
    while (store->add("done", 0) < 2) std::this_thread::sleep_for(milliseconds(1));
  });
}

// Whether a child that is forked now, and does this, ends well.
bool ends_in_a_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    body();
    _exit(0);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

// A data loader's worker, say, that frees its copy of the model.
TEST(Fork, AChildMayFreeWhatHasThreads) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto watch = std::make_unique<Watch>(store, 0, 2);
  auto lane = std::make_unique<Lane>("lane");
  lane->enqueue(c10::kCPU, [] {}, {}).wait();
  std::this_thread::sleep_for(milliseconds(100));  // their threads wait
  EXPECT_TRUE(ends_in_a_child([&] { watch.reset(); }));
  EXPECT_TRUE(ends_in_a_child([&] { lane.reset(); }));
}

TEST(Watch, ARankAloneWaitsForNobody) {
  Watch watch(nullptr, 0, 1);
  EXPECT_EQ(watch.reach(What::kOperation, "a"), 1);
  EXPECT_EQ(watch.reach(What::kOperation, "b"), 2);
  const Watch::Waiting waiting(&watch, What::kOperation, 2, "b");
  EXPECT_NO_THROW(waiting.check());
}

}  // namespace
}  // namespace dmuon::engine
