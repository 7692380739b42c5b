#include "dmuon/watch/watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dmuon/core/error.h"
#include "tests/core/forked_child.h"
#include "tests/watch/rank_threads.h"
#include "tests/watch/watches.h"

namespace dmuon::watch {
namespace {

using std::chrono::milliseconds;
using What = Rendezvous;

TEST(Watch, EndsADisagreementOnEveryRank) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    Watch watch(
        store, rank, 2, [](const std::string&) {}, kInterval);
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

// Answers nothing from some moment on, as a store beyond a partition of the network.
class SilentStore final : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    while (silent) std::this_thread::sleep_for(milliseconds(1));
    return c10d::HashStore::add(key, value);
  }
  std::atomic<bool> silent = false;
};

TEST(Watch, SaysThatTheStoreDoesNotAnswerInsteadOfWaitingForIt) {
  const auto store = c10::make_intrusive<SilentStore>();
  constexpr milliseconds kLong = 50 * kInterval;  // a store that answers does so in two of these
  Watch watch(
      store, 0, 2, [](const std::string&) {}, kLong);
  EXPECT_TRUE(watch.over("its program has ended"));
  store->silent = true;
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(watch.over("its program has ended"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20 * kLong);
  store->silent = false;  // else the destructor waits
}

// What one rank alone has called; others may come yet, and it goes on.
TEST(Watch, WarnsOnceOfAWaitThatLasts) {
  testing::internal::CaptureStderr();
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Watch>> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.push_back(std::make_unique<Watch>(
        store, rank, 3, [](const std::string&) {}, kInterval, 20 * kInterval));
  std::this_thread::sleep_for(5 * kInterval);
  ranks[0]->enter("a backward");
  const std::int64_t number = ranks[0]->reach(What::kComparison, "");
  const Watch::Waiting waiting(ranks[0].get(), What::kComparison, number, "full_params in step 3");
  std::this_thread::sleep_for(35 * kInterval);  // more than 20, and less than 40
  waiting.check();
  const std::string warned = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains_all(
      warned, {"rank 0 of the mesh has waited for ", "the same call on every rank",
               "Not come to full_params in step 3 (comparison 1): rank 1, 2 of the mesh.",
               "rank 0 of the mesh has issued 0 operations, is in a backward, and waits for",
               "rank 2 of the mesh has issued 0 operations, and waits for nobody; told "}))
      << warned;
  EXPECT_EQ(warned.find("has waited", warned.find("has waited") + 1), std::string::npos) << warned;
}

// What a wait says that ends as a process group's timeout does.
std::string error_of_a_timeout(Watch* watch, What what, std::int64_t number, milliseconds after) {
  const auto end = std::chrono::steady_clock::now() + after;
  try {
    watch->wait(
        what, number, [] { return std::string("what is awaited"); },
        [&](milliseconds most) {
          std::this_thread::sleep_for(std::min(most, kInterval));
          if (std::chrono::steady_clock::now() < end) return false;
          throw core::CommError("timed out");
        });
  } catch (const core::CommError& error) {
    return error.what();
  }
  return "";
}

// However soon a wait fails: what all have just come to, nobody is late for.
TEST(Watch, SaysWhoHasNotComeWhereAWaitFails) {
  constexpr milliseconds kLong(500);  // others have to tell within it
  for (const milliseconds after : {milliseconds(0), kLong}) {
    run_ranks(3, [&](int rank, const StorePtr& store) {
      Watch watch(
          store, rank, 3, [](const std::string&) {}, kLong);
      const auto all_are_here = [&](const std::string& key) {
        store->add(key, 1);
        while (store->add(key, 0) < 3) std::this_thread::sleep_for(milliseconds(1));
      };
      watch.reach(What::kOperation, "publish of 'a'");
      all_are_here("begun");
      if (rank != 2) {
        const std::int64_t number = watch.reach(What::kOperation, "route of 'b'");
        const std::string why = error_of_a_timeout(&watch, What::kOperation, number, after);
        EXPECT_TRUE(contains_all(
            why, {"timed out\n", "Not come to what is awaited (operation 2): rank 2 of the mesh.",
                  "rank 2 of the mesh has issued 1 operations, last publish of 'a', and waits for "
                  "nobody; told ",
                  "rank 0 of the mesh has issued 2 operations, last route of 'b', and ",
                  "rank 1 of the mesh has issued 2 operations, last route of 'b', and ",
                  "and waits for what is awaited; this rank"}))
            << why;
        EXPECT_FALSE(contains_all(why, {"does not answer"})) << why;
      }
      all_are_here("done");
    });
  }
}

// A store whose host is gone, after a while.
class Store : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    if (silent) std::this_thread::sleep_for(10 * kInterval);
    if (gone) throw std::runtime_error("Connection closed by peer");
    return c10d::HashStore::add(key, value);
  }
  std::atomic<bool> gone = false;
  std::atomic<bool> silent = false;
};

TEST(Watch, SaysWhatItKnowsWhereTheStoreIsGoneOrSilent) {
  for (const bool gone : {true, false}) {
    const auto store = c10::make_intrusive<Store>();
    Watch first(
        store, 0, 2, [](const std::string&) {}, kInterval);
    Watch second(
        store, 1, 2, [](const std::string&) {}, kInterval);
    second.reach(What::kOperation, "publish of 'a'");
    const auto fail = [&] {
      return error_of_a_timeout(&first, What::kAgreement,
                                first.reach(What::kAgreement, "what is awaited"), kInterval);
    };
    int looks = 0;  // until the second has told
    while (++looks < 100 && !contains_all(fail(), {"rank 1 of the mesh has issued"})) continue;
    (gone ? store->gone : store->silent) = true;
    const std::string why = fail();
    EXPECT_TRUE(contains_all(why, {"The store does not answer, so who has come to ",
                                   "rank 1 of the mesh has issued 1 operations, last publish"}))
        << why;
  }
}

// A rank that fails at once may be the first to look.
TEST(Watch, KnowsThatARankHasToldNothing) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Watch watch(
      store, 0, 2, [](const std::string&) {}, kInterval);
  const std::string why = error_of_a_timeout(&watch, What::kComparison,
                                             watch.reach(What::kComparison, ""), milliseconds(0));
  EXPECT_TRUE(contains_all(why, {"rank 1 of the mesh has told nothing"})) << why;
}

TEST(Watch, ARankAloneWaitsForNobody) {
  Watch watch(nullptr, 0, 1);
  EXPECT_EQ(watch.reach(What::kOperation, "a"), 1);
  EXPECT_EQ(watch.reach(What::kOperation, "b"), 2);
  const Watch::Waiting waiting(&watch, What::kOperation, 2, "b");
  EXPECT_NO_THROW(waiting.check());
}

// A data loader's worker, say, that frees its copy of the model.
TEST(Watch, MayBeFreedByAForkedChild) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto watch = std::make_unique<Watch>(store, 0, 2);
  std::this_thread::sleep_for(milliseconds(100));  // its thread waits
  EXPECT_TRUE(core::ends_in_a_child([&] { watch.reset(); }));
}

}  // namespace
}  // namespace dmuon::watch
