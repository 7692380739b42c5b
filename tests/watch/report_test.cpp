#include "dmuon/watch/report.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/watch/reports.h"

namespace dmuon::watch {
namespace {

using What = Rendezvous;

Report stored(Report report, std::int64_t ms) {
  report.stored_ms = ms;
  return report;
}

TEST(Attendance, NamesWhoHasNotComeAndHasALineForEachRank) {
  Report over = issued({"a", "b"});
  over.over = "it has had enough";
  const Report late = waits(issued({"a"}), What::kComparison, 1);
  const std::vector<Report> reports = {waits(issued({"a", "b"}), What::kOperation, 2),
                                       stored(over, 6000), stored(late, 1500), Report()};
  EXPECT_EQ(attendance(reports, 0, 9000),
            "Not come to what is awaited (operation 2): rank 3, 2 of the mesh. What ranks told "
            "last:\n"
            "  rank 3 of the mesh has told nothing\n"
            "  rank 2 of the mesh has issued 1 operations, last a, and waits for what is awaited; "
            "told 7.5 s ago\n"
            "  rank 0 of the mesh has issued 2 operations, last b, and waits for what is awaited; "
            "this rank\n"
            "  rank 1 of the mesh has issued 2 operations, last b, and is over: it has had enough; "
            "told 3.0 s ago");
}

TEST(Attendance, CountsWhatIsAwaited) {
  Report own = waits(issued({"a"}), What::kAgreement, 2);
  own.reached[Rendezvous::kAgreement] = 2;
  Report other = stored(issued({"a", "b", "c"}), 1);
  other.reached[Rendezvous::kAgreement] = 1;
  EXPECT_TRUE(contains(attendance({other, own}, 1, 1), "(agreement 2): rank 0 of the mesh"));
  other.reached[Rendezvous::kAgreement] = 2;
  EXPECT_TRUE(contains(attendance({other, own}, 1, 1),
                       "All ranks of the mesh have come to what is awaited (agreement 2)."));
}

// Another machine's clock may be ahead.
TEST(Attendance, KnowsNoAgeBelowZero) {
  const Report own = waits(issued({"a"}), What::kOperation, 1);
  EXPECT_TRUE(contains(attendance({own, stored(Report(), 2000)}, 0, 1000), "told 0.0 s ago"));
}

// Which may hold that of another, and so on.
TEST(Attendance, ShowsTheBeginningOfALongReason) {
  Report over = stored(issued({"a"}), 1);
  over.over = std::string(159, 'x') + "é and more";
  const Report own = waits(issued({"a"}), What::kOperation, 1);
  EXPECT_TRUE(contains(attendance({own, over}, 0, 1),
                       "is over: " + std::string(159, 'x') + "...; told 0.0 s ago"));
}

TEST(Attendance, OfManyRanksShowsThoseFurthestBehind) {
  std::vector<Report> reports(100, stored(issued({"a"}), 1));
  reports[0] = waits(issued({"a", "b", "c"}), What::kOperation, 3);
  reports[70] = stored(issued({}), 1);
  for (std::size_t rank = 40; rank < 60; ++rank) reports[rank] = stored(issued({"a", "b", "c"}), 1);
  const std::string text = attendance(reports, 0, 1);
  EXPECT_EQ(std::ranges::count(text, '\n'), 1 + 16);
  EXPECT_TRUE(contains(text, ": rank 70, 1, 2, ")) << text;
  EXPECT_TRUE(contains(text, ", 15, and 63 more of the mesh.")) << text;
  EXPECT_TRUE(contains(text, "\n  and 84 more")) << text;
  EXPECT_FALSE(contains(text, "rank 16 ")) << text;
}

TEST(Report, ComesBackFromText) {
  Report report = waits(issued({"publish of 'blocks.0'", "x"}), What::kComparison, 7);
  report.hashes.front() = 0xab;  // leading zeros
  report.reached[Rendezvous::kAgreement] = 3;
  report.over = "a \"quoted\" reason\n";
  report.stored_ms = 1'700'000'000'000;
  const Report back = report_from(to_text(report));
  EXPECT_EQ(to_text(back), to_text(report));
  EXPECT_EQ(back.number, 7);
  EXPECT_EQ(back.stored_ms, 1'700'000'000'000);
  EXPECT_EQ(back.awaited, What::kComparison);
  EXPECT_EQ(back.hashes, report.hashes);
  EXPECT_EQ(back.words, report.words);
}

TEST(Report, IsSmall) {
  const std::vector<std::string> many(1000, std::string(40, 'x'));
  Report report = waits(issued(many), What::kOperation, 1000);
  report.where = many[0];
  report.stored_ms = 1'700'000'000'000;
  EXPECT_LE(to_text(report).size(), 1600U);
}

}  // namespace
}  // namespace dmuon::watch
