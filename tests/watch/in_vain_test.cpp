#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "dmuon/watch/report.h"
#include "tests/watch/reports.h"

namespace dmuon::watch {
namespace {

using What = Rendezvous;

Report compares(Report report, std::int64_t number) {
  report.reached[What::kComparison] = number;
  return waits(std::move(report), What::kComparison, number);
}

TEST(InVain, IsNoWaitForARankThatComputes) {
  const Report waiting = waits(issued({"a", "b"}), What::kOperation, 2);
  EXPECT_EQ(in_vain({waiting, issued({"a"})}), "");
  EXPECT_EQ(in_vain({issued({"a"}), waiting, waiting}), "");
  EXPECT_EQ(in_vain({waiting, Report()}), "") << "a rank that has told nothing";
}

TEST(InVain, IsNoWaitForWhatAllHaveIssued) {
  const Report waiting = waits(issued({"a", "b"}), What::kOperation, 2);
  EXPECT_EQ(in_vain({waiting, waiting}), "");
}

TEST(InVain, IsAWaitInACircle) {
  const Report operation = waits(issued({"a", "b"}), What::kOperation, 2);
  const Report comparison = compares(issued({"a"}), 1);
  const std::string why =
      "rank 0 of the mesh has issued 2 operations, last b, and waits for what is awaited; rank 1 "
      "of the mesh has issued 1 operations, last a, and waits for what is awaited";
  EXPECT_EQ(in_vain({operation, comparison}), why);
  // The third waits for the second, and computes no more either; but the first two are named.
  EXPECT_EQ(in_vain({operation, comparison, operation}), why);
  // One that computes is in nobody's way.
  EXPECT_NE(in_vain({issued({}), operation, comparison}), "");
}

// As where one rank alone evaluates, and the others train.
TEST(InVain, IsSomethingElseThatWasIssuedAndSaysInWhichPass) {
  Report evaluates = waits(issued({"a", "b"}), What::kOperation, 2);
  evaluates.pass = "an evaluation forward";
  Report trains = waits(issued({"a", "c"}), What::kOperation, 2);
  const std::string why = "rank 0 of the mesh has issued b where rank 1 has issued c";
  EXPECT_EQ(in_vain({evaluates, trains}),
            why + "; rank 0 is in an evaluation forward, rank 1 in no pass");
  trains.pass = evaluates.pass;
  EXPECT_EQ(in_vain({evaluates, trains}), why);
}

// It may be the one that all others wait for.
TEST(InVain, IsNoCircleThatARankMayStillEnd) {
  const Report first = waits(issued({"a", "b"}), What::kOperation, 2);
  const Report second = compares(issued({"a"}), 1);
  const Report both = compares(issued({"a", "b"}), 1);
  EXPECT_EQ(in_vain({first, both, both}), "");
  EXPECT_EQ(in_vain({both, second, issued({"a", "b"})}), "");
}

TEST(InVain, IsAWaitForARankThatIsOver) {
  Report over = issued({"a"});
  over.over = "its program has ended";
  EXPECT_EQ(in_vain({waits(issued({"a", "b"}), What::kOperation, 2), over}),
            "rank 0 of the mesh has issued 2 operations, last b, and waits for what is awaited; "
            "rank 1 of the mesh has issued 1 operations, last a, and is over: its program has "
            "ended");
  EXPECT_EQ(in_vain({waits(issued({"a"}), What::kOperation, 1), over}), "");
  EXPECT_EQ(in_vain({over, issued({"a", "b"})}), "") << "nobody waits";
}

// Each one's update has failed, and one waits still for what the other's would have sent.
TEST(InVain, IsAWaitOfARankThatIsOverToo) {
  Report over = issued({"a"});
  over.over = "its update has failed";
  Report waiting = waits(issued({"a", "b"}), What::kOperation, 2);
  waiting.over = "its own update has failed";
  EXPECT_EQ(
      in_vain({waiting, over}),
      "rank 0 of the mesh has issued 2 operations, last b, and is over: its own update has "
      "failed; it waits for what is awaited; rank 1 of the mesh has issued 1 operations, last "
      "a, and is over: its update has failed");
  EXPECT_EQ(in_vain({over, over}), "") << "nobody waits";
}

TEST(InVain, NamesTheFirstOperationsThatDiffer) {
  const Report own = waits(issued({"a", "b", "c"}), What::kOperation, 3);
  EXPECT_EQ(in_vain({issued({"a"}), own, own, issued({"a", "d"}), issued({"a", "b", "e"})}),
            "rank 1 of the mesh has issued b where rank 3 has issued d");
  // Of those whose hashes are still told.
  Report late = own;
  late.hashes.erase(late.hashes.begin(), late.hashes.begin() + 2);
  EXPECT_EQ(in_vain({late, issued({"a", "d"})}), "");
}

TEST(InVain, NumbersOperationsWhoseWordsAreNotToldAnyMore) {
  std::vector<std::string> words{"a", "b"};
  const Report early = issued(words);
  words[1] = "c";
  words.resize(2 + Report::kMostWords, "d");
  EXPECT_EQ(in_vain({early, issued(words)}),
            "rank 0 of the mesh has issued b where rank 1 has issued operation 2");
  std::vector<std::string> others = words;
  others[1] = "b";
  EXPECT_EQ(in_vain({issued(others), issued(words)}),
            "rank 0 of the mesh has issued other operations than rank 1, up to operation 2");
  words.resize(Report::kMostHashes + 2, "d");
  others.resize(Report::kMostHashes + 2, "d");
  EXPECT_EQ(in_vain({issued(others), issued(words)}),
            "rank 0 of the mesh has issued other operations than rank 1, up to operation 3");
}

// ---- random reports ----

using Random = std::mt19937;

int draw(Random* random, int most) { return std::uniform_int_distribution<int>(0, most)(*random); }

// Whatever ranks may have told: mostly the same operations, and any waits for what they came to.
std::vector<Report> random_reports(Random* random, int num_ranks, int num_operations) {
  std::vector<Report> reports;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::vector<std::string> words;
    for (int i = draw(random, num_operations); i > 0; --i) words.emplace_back("a");
    if (!words.empty() && draw(random, 3 * num_ranks) == 0)
      words[static_cast<std::size_t>(draw(random, static_cast<int>(words.size()) - 1))] = "b";
    Report report = issued(words);
    for (int what = 1; what < kNumRendezvous; ++what) report.reached.values[what] = draw(random, 4);
    const int what = draw(random, 3);  // or nothing
    if (what < kNumRendezvous && report.reached.values[what] > 0) {
      const auto most = static_cast<int>(report.reached.values[what]) - 1;
      report = waits(std::move(report), static_cast<What>(what), 1 + draw(random, most));
    }
    if (draw(random, 2 * num_ranks) == 0) report.over = "it has ended";
    reports.push_back(std::move(report));
  }
  return reports;
}

bool misses(const Report& waiting, const Report& other) {
  return waiting.awaited && other.reached[*waiting.awaited] < waiting.number;
}

// The ranks that in_vain() must name, and the operation if these differ there: every pair, at every
// number; then every rank against every other, until nothing changes.
struct Named {
  std::int64_t operation = 0;
  std::size_t first = 0;
  std::size_t second = 0;
};

std::optional<Named> named_by_brute_force(const std::vector<Report>& reports) {
  std::optional<Named> named;
  const auto hash_at = [&](std::size_t rank, std::int64_t number) -> std::optional<std::uint64_t> {
    const std::int64_t back = reports[rank].reached[What::kOperation] - number;
    const auto size = static_cast<std::int64_t>(reports[rank].hashes.size());
    if (back < 0 || back >= size) return std::nullopt;
    return reports[rank].hashes[static_cast<std::size_t>(size - 1 - back)];
  };
  for (std::int64_t number = 1; number <= 100 && !named; ++number) {
    for (std::size_t first = 0; first < reports.size() && !named; ++first) {
      for (std::size_t second = first + 1; second < reports.size() && !named; ++second) {
        const auto a = hash_at(first, number);
        const auto b = hash_at(second, number);
        if (a && b && *a != *b) named = {number, first, second};
      }
    }
  }
  if (named) return named;
  std::set<std::size_t> stuck;
  for (std::size_t rank = 0; rank < reports.size(); ++rank)
    if (reports[rank].awaited || !reports[rank].over.empty()) stuck.insert(rank);
  const auto comes_on = [&](std::size_t rank) {
    return reports[rank].over.empty() && std::ranges::none_of(stuck, [&](std::size_t other) {
             return misses(reports[rank], reports[other]);
           });
  };
  while (std::erase_if(stuck, comes_on) > 0) continue;
  std::optional<Named> over;
  for (const std::size_t rank : stuck) {
    for (const std::size_t other : stuck) {
      if (!misses(reports[rank], reports[other])) continue;
      if (reports[rank].over.empty()) return Named{0, rank, other};
      if (!over) over = {0, rank, other};
    }
  }
  return over;
}

TEST(InVain, IsWhatEveryRankAgainstEveryOtherGives) {
  Random random(1);
  std::map<std::string, int> kinds;
  for (int round = 0; round < 3000; ++round) {
    const std::vector<Report> reports = random_reports(&random, 2 + draw(&random, 6), 4);
    const std::string why = in_vain(reports);
    const std::optional<Named> named = named_by_brute_force(reports);
    ASSERT_EQ(why.empty(), !named.has_value()) << "round " << round << ": " << why;
    if (!named) continue;
    const std::string between = named->operation > 0 ? " where " : "; ";
    EXPECT_TRUE(why.starts_with("rank " + std::to_string(named->first) + " of")) << why;
    EXPECT_TRUE(contains(why, between + "rank " + std::to_string(named->second) + " ")) << why;
    ++kinds[between + (contains(why, "is over") ? "over" : "")];
  }
  EXPECT_EQ(kinds.size(), 3U);
  for (const auto& [kind, times] : kinds) EXPECT_GT(times, 100) << kind;
}

// Ranks come to the same rendezvous in the same order, as far as each has come, and wait for any
// that they have come to; what each has told is of any moment; who is over has come to all.
TEST(InVain, IsNothingInARunThatKeepsOneOrderHoweverOldReportsAre) {
  Random random(2);
  for (int round = 0; round < 3000; ++round) {
    std::vector<What> order;
    for (int i = draw(&random, 40); i > 0; --i)
      order.push_back(static_cast<What>(std::max(0, draw(&random, 4) - 2)));
    std::vector<Report> reports(static_cast<std::size_t>(2 + draw(&random, 8)));
    for (Report& report : reports) {
      const auto moment = static_cast<std::size_t>(draw(&random, static_cast<int>(order.size())));
      for (std::size_t i = 0; i < moment; ++i) {
        if (order[i] == What::kOperation) {
          report.issue("operation at " + std::to_string(i));
        } else {
          ++report.reached[order[i]];
        }
      }
      const int what = draw(&random, 2);
      if (report.reached.values[what] > 0) {
        const auto most = static_cast<int>(report.reached.values[what]) - 1;
        report = waits(report, static_cast<What>(what), 1 + draw(&random, most));
      }
      if (moment == order.size() && draw(&random, 1) == 0) report.over = "its program has ended";
    }
    ASSERT_EQ(in_vain(reports), "") << "round " << round;
  }
}

double seconds_of(const std::vector<Report>& reports, bool is_in_vain) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_NE(in_vain(reports).empty(), is_in_vain);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(InVain, OfTwoThousandRanksTakesLessThanASecond) {
  Random random(3);
  EXPECT_LT(seconds_of(random_reports(&random, 2000, 100), true), 1);
  // Each rank waits at a place of its own, and all for one that computes: the most rounds.
  std::vector<Report> staggered(2000);
  for (std::size_t rank = 1; rank < staggered.size(); ++rank) {
    staggered[rank] = staggered[rank - 1];
    staggered[rank].issue("a");
    staggered[rank] =
        waits(staggered[rank], What::kOperation, staggered[rank].reached[What::kOperation]);
  }
  std::ranges::reverse(staggered);
  EXPECT_LT(seconds_of(staggered, false), 1);
}

}  // namespace
}  // namespace dmuon::watch
