#include "dmuon/plan/columns.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

using Counts = core::PerOwner<core::PerShape<int>>;

Counts counts_of(const balance::Assignment& assignment) {
  Counts counts;
  for (const Owner owner : assignment.problem().owners()) {
    counts.push_back(assignment.counts(owner));
  }
  return counts;
}

std::vector<std::vector<int>> sorted(const Counts& counts) {
  std::vector<std::vector<int>> all;
  for (const core::PerShape<int>& of_owner : counts) all.push_back(of_owner.values());
  std::sort(all.begin(), all.end());
  return all;
}

balance::Problem problem_of(const Case& drawn) {
  return balance::Problem(
      instance_of(group_by_shape(drawn.inventory), drawn.costs, drawn.mesh.num_owners(), 1));
}

balance::Assignment draw_assignment(balance::Random& random, const balance::Problem& problem) {
  balance::Assignment assignment(problem);
  for (const ShapeIndex s : problem.shapes()) {
    for (int i = 0; i < problem.num_matrices(s); ++i) {
      assignment.add(Owner(draw(random, 0, problem.num_owners() - 1)), s, 1);
    }
  }
  return assignment;
}

// How far the columns are from their even share of each shape, squared and scaled to whole numbers.
std::int64_t unevenness(const Counts& counts, const balance::Problem& problem, Mesh mesh) {
  std::int64_t sum = 0;
  for (const Shard column : mesh.shards()) {
    for (const ShapeIndex s : problem.shapes()) {
      std::int64_t held = 0;
      for (const Owner owner : mesh.owners()) {
        if (mesh.shard_of(owner) == column) held += counts[owner][s];
      }
      const std::int64_t off = held * mesh.num_shards - problem.num_matrices(s);
      sum += off * off;
    }
  }
  return sum;
}

TEST(ColumnsAlike, RenumberOwnersSoThatColumnsAreMoreAlike) {
  balance::Random random(4);
  std::int64_t all_before = 0;
  std::int64_t all_after = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const Case drawn = draw_case(random);
    const balance::Problem problem = problem_of(drawn);
    const balance::Assignment before = draw_assignment(random, problem);
    const balance::Assignment after = columns_alike(before, drawn.mesh);
    ASSERT_EQ(sorted(counts_of(after)), sorted(counts_of(before)));
    all_before += unevenness(counts_of(before), problem, drawn.mesh);
    all_after += unevenness(counts_of(after), problem, drawn.mesh);
  }
  EXPECT_LT(all_after, all_before * 2 / 3);
}

// Two owners that have all of one shape, two that have all of the other, on two columns.
TEST(ColumnsAlike, GiveEveryColumnItsShareOfEachShape) {
  const balance::Problem problem({{{8, {{1, 1}}, 0}, {8, {{1, 1}}, 0}}, 4});
  balance::Assignment assignment(problem);
  assignment.add(Owner(0), ShapeIndex(0), 4);
  assignment.add(Owner(2), ShapeIndex(0), 4);
  assignment.add(Owner(1), ShapeIndex(1), 4);
  assignment.add(Owner(3), ShapeIndex(1), 4);
  const balance::Assignment after = columns_alike(assignment, {2, 2});
  EXPECT_EQ(after.count(Owner(0), ShapeIndex(0)) + after.count(Owner(2), ShapeIndex(0)), 4);
  EXPECT_EQ(after.count(Owner(1), ShapeIndex(0)) + after.count(Owner(3), ShapeIndex(0)), 4);
  EXPECT_EQ(after.count(Owner(0), ShapeIndex(1)) + after.count(Owner(2), ShapeIndex(1)), 4);
}

}  // namespace
}  // namespace dmuon::plan
