// The protocol of the watch without threads.

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "tests/watch/detectors.h"

namespace dmuon::watch {
namespace {

using What = Rendezvous;

constexpr const char* kRead = "reads the alarm";
constexpr const char* kAnswer = "reads the alarm, stores its report";
constexpr const char* kAlarm = "stores its report, raises the alarm, claims, reads all";
constexpr const char* kAlarmOnly = "stores its report, raises the alarm, claims";
constexpr const char* kClaim = "reads the alarm, claims, reads all";

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
  for (DetectingRank& each : ranks_) EXPECT_EQ(each.detector.error(), why);
  EXPECT_EQ(interval()[3], kRead) << "a diagnosis is read once";
  for (const DetectingRank& each : ranks_)
    EXPECT_EQ(each.warnings, Words{}) << "they raise by themselves";
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
// Its words come to ranks beyond it by others: rank 0 waits for those of rank 1, which has failed.
TEST_F(DetectorTest, FindsAWaitForARankThatFailedInTheSameAgreement) {
  make(3);
  for (const std::size_t number : {0U, 1U, 2U}) wait(number, What::kAgreement, "the agreement");
  rank(1).end("its connection was closed", /*failed=*/true);
  rank(1).end_wait(now_);
  reports_[1] = rank(1).report(1);
  intervals(6);
  EXPECT_TRUE(contains(rank(0).error(), "rank 1 of the mesh has issued 0 operations, and is over"));
}

// Rank 1 has come to both publications, but the one that rank 0 waits for does not happen.
TEST_F(DetectorTest, FindsAWaitForAnOperationThatARankTakesBack) {
  make(2);
  for (const std::size_t number : {0U, 1U}) {
    rank(number).reach(What::kOperation, "publish of 'a'", now_);
    rank(number).reach(What::kOperation, "publish of 'b'", now_);
  }
  rank(0).begin_wait(What::kOperation, 2, "publish of 'b'", now_);
  rank(1).end_after(1, 0, "its update has failed");
  EXPECT_EQ(rank(1).report(1).words, (std::deque<std::string>{"publish of 'a'"}));
  EXPECT_EQ(rank(1).report(1).hashes.size(), 1U);
  reports_[1] = rank(1).report(1);
  ranks_[1].dead = true;
  intervals(6);
  EXPECT_TRUE(contains(rank(0).error(),
                       "rank 1 of the mesh has issued 1 operations, last publish "
                       "of 'a', and is over: its update has failed"));
}

// Both ranks' updates fail, and then both come to another publication, for which they wait.
TEST_F(DetectorTest, FindsWaitsOfRanksThatHaveAllTakenSomethingBack) {
  make(2);
  for (const std::size_t number : {0U, 1U}) {
    rank(number).reach(What::kOperation, "publish of 'a'", now_);
    rank(number).end_after(1, 0, core::message("update ", number, " has failed"));
    EXPECT_EQ(rank(number).reach(What::kOperation, "publish of 'b'", now_), 2);
    rank(number).begin_wait(What::kOperation, 2, "publish of 'b'", now_);
    reports_[number] = rank(number).report(1);
  }
  intervals(6);
  for (const std::size_t number : {0U, 1U})
    EXPECT_TRUE(contains(rank(number).error(), core::message("update ", number, " has failed")));
  EXPECT_TRUE(contains(rank(1).error(), "it waits for publish of 'b'"));
}

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
  EXPECT_TRUE(contains(ranks_[0].warnings[0],
                       "dmuon: rank 0 of the mesh has waited for 11 s for full_params in step 3, "
                       "and waits until the timeout if others never come. Expected: the same call "
                       "on every rank. Not come to full_params in step 3 (comparison 1): rank 1, "
                       "2 of the mesh."))
      << ranks_[0].warnings[0];
  EXPECT_TRUE(contains(ranks_[0].warnings[0], "is in a backward, and waits for full_params"));
  intervals(17);
  EXPECT_EQ(ranks_[0].warnings.size(), 1U);
  intervals(3);
  EXPECT_EQ(ranks_[0].warnings.size(), 2U);
  wait(0, What::kComparison, "full_params in step 4");
  intervals(22);
  EXPECT_EQ(ranks_[0].warnings.size(), 3U) << "10 s after the next wait began";
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

// One rank has come to something of dmuon's, the other waits inside of the host framework. dmuon
// cannot raise there, so it warns. Once others have warned too, it gives up what it waits for.
TEST_F(DetectorTest, FindsAWaitForARankThatHasLeft) {
  make(2);
  rank(0).reach(What::kOperation, "collectives of X", now_);
  rank(0).leave("collectives of X", now_);
  wait(1, What::kComparison, "here");
  for (int i = 0; i < 10 && ranks_[0].warnings.empty(); ++i) interval();
  EXPECT_TRUE(contains(rank(1).error(), "last collectives of X, and waits for collectives of X"));
  EXPECT_EQ(ranks_[0].warnings, Words{rank(0).error()});
  std::vector<int> times_given_up;
  for (int i = 0; i < 4; ++i) {
    times_given_up.push_back(ranks_[0].times_given_up);
    interval();
  }
  EXPECT_EQ(times_given_up, (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(ranks_[1].times_given_up, 0) << "it raises by itself";
  EXPECT_EQ(ranks_[0].warnings.size(), 1U);
  EXPECT_EQ(ranks_[1].warnings, Words{});
}

// The update's lane has ended the rank. Its host may be told of it, and so wait no more.
class FailedUpdate : public DetectorTest {
 protected:
  FailedUpdate() {
    make(2);
    rank(0).reach(What::kOperation, "collectives of X", now_);
    rank(0).leave("collectives of X", now_);
    rank(0).end_after(1, 0, "its update has failed");
    wait(1, What::kComparison, "here");
  }
};

TEST_F(FailedUpdate, GivesUpWhatItsHostWaitsFor) {
  intervals(10);
  EXPECT_NE(rank(1).error(), "");
  EXPECT_EQ(ranks_[0].times_given_up, 1);
}

TEST_F(FailedUpdate, GivesNothingUpOnceItsHostHasTheError) {
  rank(0).raised();
  intervals(10);
  EXPECT_NE(rank(1).error(), "");
  EXPECT_EQ(ranks_[0].times_given_up, 0);
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
    Detector detector(0, 2, std::chrono::milliseconds(10'000));
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

TEST(Detector, KeepsAnErrorThatNoCallHasRaised) {
  Detector raises(0, 2, std::chrono::seconds(10));
  raises.end_after(1, 0, "an update has failed");
  EXPECT_EQ(raises.unraised(), "an update has failed");
  raises.raised();
  EXPECT_EQ(raises.unraised(), "");
  raises.end_after(1, 0, "the next one has failed too");
  EXPECT_EQ(raises.unraised(), "");
  Detector leaves(0, 2, std::chrono::seconds(10));
  leaves.end("its program has ended");
  leaves.end_after(1, 0, "an update has failed");
  EXPECT_EQ(leaves.unraised(), "an update has failed");
  leaves.end_after(1, 0, "the next one has failed too");
  leaves.end("a peer is lost", /*failed=*/true);
  EXPECT_EQ(leaves.unraised(), "an update has failed");
}

}  // namespace
}  // namespace dmuon::watch
