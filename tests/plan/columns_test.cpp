#include "dmuon/plan/columns.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

using Counts = std::vector<std::vector<int>>;  // [owners][shapes]

Counts counts_of(const balance::Assignment& assignment) {
  Counts counts;
  for (int owner = 0; owner < assignment.problem().num_owners(); ++owner) {
    counts.emplace_back();
    for (int s = 0; s < assignment.problem().num_shapes(); ++s) {
      counts.back().push_back(assignment.count(owner, s));
    }
  }
  return counts;
}

balance::Problem problem_of(const Case& drawn) {
  return balance::Problem(
      instance_of(group_by_shape(drawn.inventory), drawn.costs, drawn.mesh.num_owners(), 1));
}

balance::Assignment draw_assignment(balance::Random& random, const balance::Problem& problem) {
  balance::Assignment assignment(problem);
  for (int s = 0; s < problem.num_shapes(); ++s) {
    for (int i = 0; i < problem.num_matrices(s); ++i) {
      assignment.add(draw(random, 0, problem.num_owners() - 1), s, 1);
    }
  }
  return assignment;
}

// How far the columns are from their even share of each shape, squared and scaled to whole numbers.
std::int64_t unevenness(const Counts& counts, const balance::Problem& problem, Mesh mesh) {
  std::int64_t sum = 0;
  for (int column = 0; column < mesh.num_shards; ++column) {
    for (int s = 0; s < problem.num_shapes(); ++s) {
      std::int64_t held = 0;
      for (int owner = 0; owner < mesh.num_owners(); ++owner) {
        if (mesh.shard_of(owner) != column) continue;
        held += counts[static_cast<std::size_t>(owner)][static_cast<std::size_t>(s)];
      }
      const std::int64_t off = held * mesh.num_shards - problem.num_matrices(s);
      sum += off * off;
    }
  }
  return sum;
}

TEST(ColumnsAlike, RenumberOwnersUntilNoTwoColumnsGainByASwap) {
  balance::Random random(4);
  for (int trial = 0; trial < 60; ++trial) {
    const Case drawn = draw_case(random);
    const balance::Problem problem = problem_of(drawn);
    const balance::Assignment before = draw_assignment(random, problem);
    const balance::Assignment after = columns_alike(before, drawn.mesh);
    Counts counts = counts_of(after);
    Counts sorted = counts;
    Counts expected = counts_of(before);
    std::sort(sorted.begin(), sorted.end());
    std::sort(expected.begin(), expected.end());
    ASSERT_EQ(sorted, expected);
    const std::int64_t found = unevenness(counts, problem, drawn.mesh);
    for (std::size_t a = 0; a < counts.size(); ++a) {
      for (std::size_t b = a + 1; b < counts.size(); ++b) {
        std::swap(counts[a], counts[b]);
        ASSERT_GE(unevenness(counts, problem, drawn.mesh), found) << a << " and " << b;
        std::swap(counts[a], counts[b]);
      }
    }
  }
}

// Two owners that have all of one shape, two that have all of the other, on two columns.
TEST(ColumnsAlike, GiveEveryColumnItsShareOfEachShape) {
  const balance::Problem problem({{{8, {{1, 1}}, 0}, {8, {{1, 1}}, 0}}, 4});
  balance::Assignment assignment(problem);
  assignment.add(0, 0, 4);
  assignment.add(2, 0, 4);
  assignment.add(1, 1, 4);
  assignment.add(3, 1, 4);
  const balance::Assignment after = columns_alike(assignment, {2, 2});
  EXPECT_EQ(after.count(0, 0) + after.count(2, 0), 4);
  EXPECT_EQ(after.count(1, 0) + after.count(3, 0), 4);
  EXPECT_EQ(after.count(0, 1) + after.count(2, 1), 4);
}

}  // namespace
}  // namespace dmuon::plan
