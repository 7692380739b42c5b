#include "dmuon/engine/report.h"

#include <gtest/gtest.h>

#include <functional>

namespace dmuon::engine {
namespace {

using What = Rendezvous;

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

}  // namespace
}  // namespace dmuon::engine
