// The protocol of the watch without threads, for devices with streams.

#include <gtest/gtest.h>

#include "tests/watch/detectors.h"

namespace dmuon::watch {
namespace {

using What = Rendezvous;

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
  intervals(8);
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

TEST_F(StuckDevice, IsGivenUpOnceIfOneOperationTakesLongerThanTheTimeout) {
  rank(0).set_device_timeout(20 * kLook);
  std::int64_t oldest = 1;
  ranks_[0].device = [&] { return std::optional(Stuck{oldest, "publish of 'a'"}); };
  intervals(15);
  oldest = 2;  // it has gone on meanwhile
  intervals(15);
  EXPECT_EQ(ranks_[0].times_given_up, 0);
  intervals(15);
  EXPECT_EQ(ranks_[0].times_given_up, 1);
  EXPECT_TRUE(contains(rank(0).error(),
                       "the device of rank 0 of the mesh has waited in publish of"
                       " 'a', on its device (operation 2), for 10 s"));
}

}  // namespace
}  // namespace dmuon::watch
