// The protocol of the watch without threads: intervals of all ranks, one after the other.

#include "dmuon/watch/detector.h"

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <utility>

#include "tests/watch/reports.h"

namespace dmuon::watch {
namespace {

using std::chrono::milliseconds;
using What = Rendezvous;
using Words = std::vector<std::string>;

constexpr milliseconds kLook(500);
constexpr std::int64_t kPublished = 1000;
constexpr const char* kRead = "reads the alarm";
constexpr const char* kAnswer = "reads the alarm, stores its report";
constexpr const char* kAlarm = "stores its report, raises the alarm, claims, reads all";
constexpr const char* kAlarmOnly = "stores its report, raises the alarm, claims";
constexpr const char* kClaim = "reads the alarm, claims, reads all";

// A rank, and what it knows of claims. `device` is asked if there is one.
struct Rank {
  Rank(std::size_t number, std::size_t size) : detector(number, size, milliseconds(10'000)) {}

  Detector detector;
  std::function<std::optional<Stuck>()> device;
  std::int64_t known_claim = 0;
  std::int64_t diagnosed = 0;
  std::string does;  // in its last interval
  Words warnings;
  int times_given_up = 0;
  bool dead = false;
};

class DetectorTest : public testing::Test {
 protected:
  // Ranks, which have stored that they have begun.
  void make(std::size_t size) {
    reports_.resize(size);
    for (std::size_t rank = 0; rank < size; ++rank) ranks_.emplace_back(rank, size);
  }

  Detector& rank(std::size_t number) { return ranks_[number].detector; }

  // Reaches a rendezvous and waits there.
  void wait(std::size_t number, What what, const std::string& described) {
    const std::int64_t reached = rank(number).reach(what, described, now_);
    rank(number).begin_wait(what, reached, described, now_);
  }

  // As Watch does it, up to its claim. Returns true if the claim was granted.
  bool begin(std::size_t number) {
    Rank& rank = ranks_[number];
    Detector& detector = rank.detector;
    if (detector.begin_interval(rank.device != nullptr)) detector.see_device(rank.device());
    const bool raises = detector.raises_alarm(now_);
    rank.does = raises ? "stores its report, raises the alarm" : "reads the alarm";
    if (raises) {
      reports_[number] = detector.report(1);
      ++alarm_;
    }
    const Detector::Next next = detector.see_alarm(alarm_, alarm_ >= kPublished, rank.diagnosed);
    if (next.stores_report) {
      rank.does += ", stores its report";
      reports_[number] = detector.report(1);
    }
    if (next.reads_diagnosis) {
      rank.does += ", reads the diagnosis";
      diagnosis_ = published_;
    }
    if (!next.claims) return false;
    rank.does += ", claims";
    const bool granted = rank.known_claim == claim_;
    if (granted) {
      ++claim_;
      diagnosed_ = std::max(next.answered, rank.diagnosed);
    }
    rank.known_claim = claim_;
    rank.diagnosed = diagnosed_;
    return granted;
  }

  void finish(std::size_t number, bool granted) {
    Rank& rank = ranks_[number];
    std::vector<Report> reports;
    if (granted) {
      rank.does += ", reads all";
      reports = reports_;
      diagnosis_ = in_vain(reports);
      if (!diagnosis_.empty()) {
        rank.does += ", publishes";
        published_ = diagnosis_;
        alarm_ += kPublished;
      }
    }
    const Detector::Conclusion result =
        rank.detector.conclude(reports, std::exchange(diagnosis_, ""), now_, 1);
    if (!result.warning.empty()) rank.warnings.push_back(result.warning);
    rank.times_given_up += result.gives_up ? 1 : 0;
  }

  // Returns what each rank does in one interval.
  Words interval() {
    Words all;
    now_ += kLook;
    for (std::size_t number = 0; number < ranks_.size(); ++number) {
      if (!ranks_[number].dead) finish(number, begin(number));
      all.push_back(ranks_[number].dead ? "" : ranks_[number].does);
    }
    return all;
  }

  void intervals(int times) {
    for (int i = 0; i < times; ++i) interval();
  }

  std::deque<Rank> ranks_;
  Detector::Time now_;
  // The store.
  std::vector<Report> reports_;
  std::int64_t alarm_ = 0;
  std::int64_t claim_ = 0;
  std::int64_t diagnosed_ = 0;
  std::string published_;

 private:
  std::string diagnosis_;  // read or made in this interval
};

TEST_F(DetectorTest, OnlyReadsTheAlarmWhileNoWaitSpansTwoIntervals) {
  make(2);
  for (int i = 0; i < 10; ++i) {
    wait(0, What::kOperation, "publish of 'a'");
    if (i % 2 == 0) rank(0).end_wait(now_);
    EXPECT_EQ(interval(), (Words{kRead, kRead}));
  }
}

TEST_F(DetectorTest, StoresItsReportAndRaisesTheAlarmOncePerWait) {
  make(2);
  for (const std::int64_t alarm : {1, 2}) {
    wait(0, What::kOperation, "publish of 'a'");
    interval();
    EXPECT_EQ(alarm_, alarm - 1);
    interval();
    EXPECT_EQ(ranks_[0].does, kAlarm);
    EXPECT_EQ(reports_[0].number, alarm);
    intervals(10);
    EXPECT_EQ(alarm_, alarm);
  }
}

TEST_F(DetectorTest, StoresItsReportWhenItSeesTheAlarmChange) {
  make(3);
  rank(1).reach(What::kOperation, "publish of 'a'", now_);
  wait(0, What::kOperation, "publish of 'a'");
  interval();
  EXPECT_EQ(interval(), (Words{kAlarm, kAnswer, kAnswer}));
  EXPECT_EQ(reports_[1].words.back(), "publish of 'a'");
  EXPECT_EQ(interval(), (Words{kRead, kRead, kRead}));
  EXPECT_EQ(interval(), (Words{kClaim, kRead, kRead})) << "two intervals after the alarm";
  EXPECT_EQ(interval(), (Words{kRead, kRead, kRead}));
}

// Rank 3 computes. Its report is there two intervals after the alarm; then one rank diagnoses.
TEST_F(DetectorTest, FindsARankThatHasIssuedSomethingElseAndWaitsForNobody) {
  make(4);
  for (const std::size_t number : {0, 1, 2}) wait(number, What::kOperation, "publish of 'a'");
  rank(3).reach(What::kOperation, "route of 'b'", now_);
  interval();
  EXPECT_EQ(interval(), (Words{kAlarm, kAlarmOnly, kAlarmOnly, kAnswer}));
  EXPECT_EQ(interval()[2], kRead);
  EXPECT_EQ(interval(), (Words{std::string(kClaim) + ", publishes",
                               "reads the alarm, stores its report, reads the diagnosis",
                               "reads the alarm, stores its report, reads the diagnosis",
                               "reads the alarm, stores its report, reads the diagnosis"}));
  const std::string why =
      "dmuon: ranks wait for each other in vain: rank 0 of the mesh has issued publish of 'a' "
      "where "
      "rank 3 has issued route of 'b'";
  for (Rank& each : ranks_) EXPECT_EQ(each.detector.error(), why);
  EXPECT_EQ(interval()[3], kRead) << "a diagnosis is read once";
  for (const Rank& each : ranks_) EXPECT_EQ(each.warnings, Words{}) << "they raise by themselves";
}

// The claim of rank 0 came before rank 1 had stored its report.
TEST_F(DetectorTest, FindsACircleTwoIntervalsAfterTheLastAlarmIfItsClaimWasDenied) {
  make(3);
  wait(0, What::kComparison, "here");
  wait(1, What::kAgreement, "there");
  interval();
  EXPECT_EQ(interval(), (Words{kAlarm, kAlarmOnly, kAnswer}));
  EXPECT_EQ(rank(0).error(), "");
  intervals(2);
  for (const std::size_t number : {0, 1, 2})
    EXPECT_TRUE(contains(rank(number).error(),
                         "rank 0 of the mesh has issued 0 operations, and waits for here; rank 1 "
                         "of the mesh has issued 0 operations, and waits for there"));
}

TEST_F(DetectorTest, FindsAWaitForARankThatIsOverWhoeverWaitsLater) {
  make(3);
  EXPECT_TRUE(rank(1).end("it has had enough"));
  EXPECT_FALSE(rank(1).end("again"));
  reports_[1] = rank(1).report(1);
  ++alarm_;
  ranks_[1].dead = true;
  intervals(10);
  wait(2, What::kAgreement, "an agreement");
  interval();
  EXPECT_EQ(interval()[2], std::string(kAlarm) + ", publishes");
  EXPECT_TRUE(contains(rank(2).error(), "is over: it has had enough"));
  interval();
  EXPECT_EQ(rank(0).error(), rank(2).error()) << "the diagnosis is for all that wait";
}

// Nobody knows that rank 0 has died. The others wait for each other, not for rank 0.
TEST_F(DetectorTest, NeedsNoDeadRankToFindACircleOfOthers) {
  make(4);
  ranks_[0].dead = true;
  wait(1, What::kComparison, "here");
  wait(2, What::kAgreement, "there");
  intervals(4);
  EXPECT_TRUE(contains(rank(1).error(), "rank 1 of the mesh"));
  EXPECT_TRUE(contains(rank(1).error(), "; rank 2 of the mesh"));
}

// It dies between its claim and its diagnosis. The next alarm, of the slow wait, finds it.
TEST_F(DetectorTest, DiagnosesAfterTheNextAlarmIfTheClaimantHasDied) {
  make(3);
  rank(2).reach(What::kOperation, "route of 'b'", now_);
  for (const std::size_t number : {0, 1}) wait(number, What::kOperation, "publish of 'a'");
  intervals(3);
  EXPECT_EQ(alarm_, 2);
  now_ += kLook;
  EXPECT_TRUE(begin(1));
  ranks_[1].dead = true;
  EXPECT_FALSE(begin(0));
  finish(0, false);
  finish(2, begin(2));
  for (int i = 0; i < 15; ++i) EXPECT_EQ(interval()[0], kRead);
  EXPECT_EQ(rank(0).error(), "");
  interval();  // 10 s since the wait began
  EXPECT_TRUE(contains(rank(0).error(), "has issued publish of 'a' where rank 2 has issued route"));
}

TEST_F(DetectorTest, WarnsOfASlowWaitAfterTenSecondsAndThenAfterTwiceAsLong) {
  make(3);
  rank(0).enter("a backward");
  wait(0, What::kComparison, "full_params in step 3");
  intervals(19);
  EXPECT_EQ(alarm_, 1);
  interval();
  EXPECT_EQ(alarm_, 2) << "10 s after the wait began";
  EXPECT_EQ(ranks_[0].warnings.size(), 0U) << "before all have stored their reports";
  interval();
  interval();
  ASSERT_EQ(ranks_[0].warnings.size(), 1U);
  EXPECT_TRUE(contains(
      ranks_[0].warnings[0],
      "dmuon: rank 0 of the mesh has waited for 11 s, and waits until the timeout if others never "
      "come: what is collective is called on all ranks. Not come to full_params in step 3 "
      "(comparison 1): rank 1, 2 of the mesh."))
      << ranks_[0].warnings[0];
  EXPECT_TRUE(contains(ranks_[0].warnings[0], "is in a backward, and waits for full_params"));
  intervals(17);
  EXPECT_EQ(ranks_[0].warnings.size(), 1U);
  intervals(3);
  EXPECT_EQ(ranks_[0].warnings.size(), 2U);
  EXPECT_EQ(rank(0).error(), "");
  EXPECT_EQ(ranks_[1].warnings.size(), 0U);
}

TEST_F(DetectorTest, DoesNotWarnOfAnOperationToWhichAllHaveCome) {
  make(2);
  rank(1).reach(What::kOperation, "publish of 'a'", now_);
  wait(0, What::kOperation, "publish of 'a'");
  intervals(50);
  EXPECT_EQ(alarm_, 3) << "slow twice";
  EXPECT_EQ(ranks_[0].warnings, Words{});
}

TEST_F(DetectorTest, DoesNotWarnOfASlowWaitThatIsInVain) {
  make(2);
  wait(0, What::kOperation, "publish of 'a'");
  intervals(19);
  rank(1).end("its program has ended");
  intervals(3);
  EXPECT_NE(rank(0).error(), "");
  EXPECT_EQ(ranks_[0].warnings, Words{});
}

// The host of rank 0 is blocked outside of dmuon, or computes. It runs ahead of its device.
class StuckDevice : public DetectorTest {
 protected:
  StuckDevice() {
    make(2);
    ranks_[0].device = [this] {
      ++times_asked_;
      return std::optional(Stuck{1, "publish of 'a'"});
    };
    rank(0).reach(What::kOperation, "publish of 'a'", now_);
    rank(0).reach(What::kOperation, "route of 'b'", now_);
  }

  int times_asked_ = 0;
};

TEST_F(StuckDevice, IsGivenUpOnceIfItWaitsInVain) {
  rank(1).end("its program has ended");
  reports_[1] = rank(1).report(1);
  intervals(10);
  EXPECT_EQ(ranks_[0].times_given_up, 1);
  ASSERT_EQ(ranks_[0].warnings.size(), 1U);
  EXPECT_EQ(ranks_[0].warnings[0], rank(0).error());
  EXPECT_TRUE(contains(rank(0).error(),
                       "rank 0 of the mesh has issued 2 operations, last route of 'b', and waits "
                       "for publish of 'a', on its device; rank 1 of the mesh has issued 0"));
  EXPECT_EQ(ranks_[1].times_given_up, 0) << "it waits for nobody";
}

TEST_F(StuckDevice, IsGivenUpIfAnotherRankHasIssuedSomethingElse) {
  rank(1).reach(What::kOperation, "route of 'b'", now_);
  intervals(6);
  EXPECT_EQ(ranks_[0].times_given_up, 1);
  EXPECT_TRUE(contains(rank(0).error(), "has issued publish of 'a' where rank 1 has issued route"));
}

TEST_F(StuckDevice, IsLeftAloneIfTheOthersHaveComeToItsOperation) {
  rank(1).reach(What::kOperation, "publish of 'a'", now_);
  rank(1).end("its program has ended");
  reports_[1] = rank(1).report(1);
  intervals(30);
  EXPECT_EQ(rank(0).error(), "");
  EXPECT_EQ(ranks_[0].times_given_up, 0);
}

TEST_F(StuckDevice, IsAskedOnlyIfTheHostWaitsForNobodyAndComesToNothingNew) {
  interval();
  EXPECT_EQ(times_asked_, 0) << "it has just come to something";
  interval();
  EXPECT_EQ(times_asked_, 1);
  wait(0, What::kComparison, "here");
  intervals(3);
  EXPECT_EQ(times_asked_, 1) << "its host waits";
  EXPECT_EQ(rank(0).report(1).where, "here");
  rank(0).end_wait(now_);
  interval();
  EXPECT_EQ(times_asked_, 1) << "its wait has just ended";
  // It comes to something new while the device is asked.
  ranks_[0].device = [this] {
    rank(0).reach(What::kOperation, "publish of 'c'", now_);
    return std::optional(Stuck{1, "publish of 'a'"});
  };
  interval();
  EXPECT_FALSE(rank(0).report(1).awaited.has_value());
  const std::int64_t alarm = alarm_;
  ranks_[0].device = [this] {
    wait(0, What::kComparison, "here");
    return std::nullopt;
  };
  interval();
  interval();
  EXPECT_EQ(alarm_, alarm) << "that wait has just begun";
  rank(0).end_wait(now_);
  rank(0).end("it has had enough");
  ranks_[0].device = [this] { return ++times_asked_, std::nullopt; };
  intervals(3);
  EXPECT_EQ(times_asked_, 1) << "it is over";
}

TEST_F(StuckDevice, IsNotGivenUpIfItsHostWaitsInVainToo) {
  intervals(2);
  rank(1).end("its program has ended");
  reports_[1] = rank(1).report(1);
  wait(0, What::kComparison, "here");
  intervals(5);
  EXPECT_TRUE(contains(rank(0).error(), "and waits for here"));
  EXPECT_EQ(ranks_[0].times_given_up, 0) << "its host raises";
}

// One rank has come to something of dmuon's, the other waits inside of the host framework. Nothing
// of dmuon's can raise there, so it gets a warning.
TEST_F(DetectorTest, FindsAWaitForARankThatHasLeft) {
  make(2);
  rank(0).reach(What::kOperation, "collectives of X", now_);
  rank(0).leave("collectives of X", now_);
  wait(1, What::kComparison, "here");
  intervals(5);
  EXPECT_TRUE(contains(rank(1).error(), "last collectives of X, and waits for collectives of X"));
  EXPECT_EQ(ranks_[0].warnings, Words{rank(0).error()});
  EXPECT_EQ(ranks_[1].warnings, Words{});
}

TEST_F(DetectorTest, IsNotSlowWhereItHasLeft) {
  make(2);
  rank(0).reach(What::kOperation, "collectives of X", now_);
  rank(0).leave("collectives of X", now_);
  intervals(50);
  EXPECT_EQ(alarm_, 1);
  // It waits for what it issued before it left, and raises by itself.
  rank(0).begin_wait(What::kOperation, 1, "publish of 'a'", now_);
  rank(1).end("its program has ended");
  reports_[1] = rank(1).report(1);
  intervals(3);
  EXPECT_NE(rank(0).error(), "");
  EXPECT_EQ(ranks_[0].warnings, Words{});
}

TEST_F(DetectorTest, HasLeftUntilItComesToAnythingElse) {
  for (const What next : {What::kOperation, What::kComparison, What::kAgreement}) {
    Detector detector(0, 2, milliseconds(10'000));
    const auto awaited = [&] {
      const Report report = detector.report(1);
      return report.awaited ? report.number : 0;
    };
    detector.reach(What::kOperation, "publish of 'a'", now_);
    EXPECT_EQ(awaited(), 0);
    detector.reach(What::kOperation, "X", now_);
    detector.leave("X", now_);
    EXPECT_EQ(detector.num_operations(), 2);
    EXPECT_EQ(awaited(), 2);
    detector.begin_wait(What::kOperation, 1, "publish of 'a'", now_);
    EXPECT_EQ(awaited(), 1) << "while it waits for what it issued before";
    detector.end_wait(now_);
    EXPECT_EQ(awaited(), 2);
    detector.reach(next, "Y", now_);
    EXPECT_EQ(awaited(), 0);
    detector.begin_wait(What::kOperation, 1, "", now_);
    detector.end_wait(now_);
    EXPECT_EQ(awaited(), 0);
  }
}

}  // namespace
}  // namespace dmuon::watch
