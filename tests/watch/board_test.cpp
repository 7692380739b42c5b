#include "dmuon/watch/board.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/watch/reports.h"

namespace dmuon::watch {
namespace {

class Boards : public testing::Test {
 protected:
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  Board first_{store_, 0, 3};
  Board second_{store_, 1, 3};
  Board third_{store_, 2, 3};
};

TEST_F(Boards, HoldTheNewestReportOfEachRank) {
  second_.store(issued({"a"}));
  EXPECT_EQ(first_.reports()[0].hashes.size(), 0U);
  EXPECT_EQ(first_.reports()[1].words.back(), "a");
  second_.store(issued({"a", "b"}));
  third_.store(issued({"c"}));
  first_.store(issued({"d"}));
  const std::vector<Report> reports = first_.reports();
  EXPECT_EQ(reports[0].words.back(), "d");
  EXPECT_EQ(reports[1].words.back(), "b");
  EXPECT_EQ(reports[2].words.back(), "c");
}

TEST_F(Boards, CountAlarms) {
  EXPECT_EQ(first_.alarm(false), 0);
  EXPECT_EQ(second_.alarm(true), 1);
  EXPECT_EQ(first_.alarm(true), 2);
  EXPECT_EQ(third_.alarm(false), 2);
}

TEST_F(Boards, RaiseTheAlarmForADiagnosis) {
  first_.alarm(true);
  EXPECT_FALSE(Board::is_published(second_.alarm(false)));
  third_.publish("it is in vain");
  EXPECT_TRUE(Board::is_published(second_.alarm(false)));
  EXPECT_EQ(second_.diagnosis(), "it is in vain");
}

TEST_F(Boards, GrantAClaimOnlyIfTheRankKnowsTheNewestOne) {
  EXPECT_TRUE(first_.claim(1, 2));
  EXPECT_EQ(first_.diagnosed(), 1);
  EXPECT_FALSE(second_.claim(3, 3));
  EXPECT_EQ(second_.diagnosed(), 1);  // it knows less than it claims, so it claims again
  EXPECT_FALSE(third_.claim(2, 3));
  EXPECT_TRUE(second_.claim(3, 3));
  EXPECT_FALSE(first_.claim(4, 4));
  EXPECT_EQ(first_.diagnosed(), 3);
  EXPECT_FALSE(third_.claim(4, 4));
  // Granted to one that has raised the alarm, though its answers are older than the diagnosed.
  EXPECT_TRUE(third_.claim(2, 5));
  EXPECT_EQ(third_.diagnosed(), 3);
}

}  // namespace
}  // namespace dmuon::watch
