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

/// Has issued these, and waits for nobody.
Report issued(const std::vector<std::string>& operations) {
  Report report;
  std::uint64_t hash = 0;
  for (const std::string& what : operations) {
    hash = hash * 31 + std::hash<std::string>()(what);
    report.issued.push_back({hash, what});
  }
  report.reached[0] = static_cast<std::int64_t>(operations.size());
  return report;
}

Report waits(Report report, What what, std::int64_t number) {
  report.awaited = what;
  report.number = number;
  report.where = "what is awaited";
  return report;
}

bool is_in_vain(const std::vector<Report>& reports, std::size_t self) {
  return !in_vain(reports, self).empty();
}

TEST(InVain, IsNoWaitForARankThatComputes) {
  const Report waiting = waits(issued({"a", "b"}), What::kOperation, 2);
  EXPECT_FALSE(is_in_vain({waiting, issued({"a"})}, 0));
  EXPECT_FALSE(is_in_vain({waiting, issued({"a"})}, 1));
}

TEST(InVain, IsNoWaitForWhatAllHaveIssued) {
  const Report waiting = waits(issued({"a", "b"}), What::kOperation, 2);
  EXPECT_FALSE(is_in_vain({waiting, waiting}, 0));
}

TEST(InVain, IsAWaitInACircle) {
  const Report operation = waits(issued({"a", "b"}), What::kOperation, 2);
  Report comparison = waits(issued({"a"}), What::kComparison, 1);
  comparison.reached[1] = 1;
  EXPECT_TRUE(is_in_vain({operation, comparison}, 0));
  EXPECT_TRUE(is_in_vain({operation, comparison}, 1));
  // The third waits for the second, and computes no more either.
  Report third = waits(issued({"a"}), What::kAgreement, 1);
  EXPECT_TRUE(is_in_vain({operation, comparison, third}, 2));
}

// It may be the one that all others wait for.
TEST(InVain, IsNoCircleThatARankMayStillEnd) {
  const Report first = waits(issued({"a", "b"}), What::kOperation, 2);
  Report second = waits(issued({"a"}), What::kComparison, 1);
  second.reached[1] = 1;
  Report both = issued({"a", "b"});
  both.reached[1] = 1;
  EXPECT_FALSE(is_in_vain({first, both, both}, 0));
  EXPECT_FALSE(is_in_vain({both, second, issued({"a", "b"})}, 1));
}

TEST(InVain, IsAWaitForARankThatIsOver) {
  Report over = issued({"a"});
  over.over = "its program has ended";
  const std::string why = in_vain({waits(issued({"a", "b"}), What::kOperation, 2), over}, 0);
  EXPECT_NE(why.find("rank 1"), std::string::npos) << why;
  EXPECT_NE(why.find("its program has ended"), std::string::npos) << why;
  EXPECT_FALSE(is_in_vain({waits(issued({"a"}), What::kOperation, 1), over}, 0));
}

TEST(InVain, NamesOperationsThatDiffer) {
  const Report own = waits(issued({"a", "b", "c"}), What::kOperation, 3);
  const std::string why = in_vain({own, issued({"a", "d"})}, 0);
  EXPECT_EQ(why, "rank 0 of the mesh has issued b where rank 1 has issued d");
  // Of what both still remember.
  Report late = own;
  late.issued.erase(late.issued.begin(), late.issued.begin() + 2);
  EXPECT_FALSE(is_in_vain({late, issued({"a", "d"})}, 0));
}

TEST(Report, ComesBackFromText) {
  Report report = waits(issued({"publish of 'blocks.0'", "x"}), What::kComparison, 7);
  report.reached[2] = 3;
  report.over = "a \"quoted\" reason\n";
  const Report back = report_from(to_text(report));
  EXPECT_EQ(to_text(back), to_text(report));
  EXPECT_EQ(back.number, 7);
  EXPECT_EQ(back.awaited, What::kComparison);
  EXPECT_EQ(back.issued.back().what, "x");
}

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
