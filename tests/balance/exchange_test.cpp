#include "dmuon/balance/exchange.h"

#include <gtest/gtest.h>

#include <optional>

#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

constexpr int kNumExchangeInstances = 100;

// Everything at random owners, as long as it fits.
std::optional<Assignment> draw_assignment(Random& random, const Problem& problem) {
  Assignment assignment(problem);
  for (const ShapeIndex s : problem.shapes()) {
    for (int i = 0; i < problem.num_matrices(s); ++i) {
      Owner owner(random.below(problem.num_owners()));
      for (int tries = 0; !assignment.fits(owner, s, 1); ++tries) {
        if (tries == problem.num_owners()) return std::nullopt;
        owner = Owner((owner.value() + 1) % problem.num_owners());
      }
      assignment.add(owner, s, 1);
    }
  }
  return assignment;
}

void expect_complete(const Assignment& assignment) {
  const Problem& problem = assignment.problem();
  PerOwner<Nanoseconds> loads(problem.num_owners());
  for (const ShapeIndex s : problem.shapes()) {
    int placed = 0;
    for (const Owner owner : problem.owners()) {
      ASSERT_GE(assignment.count(owner, s), 0);
      placed += assignment.count(owner, s);
      loads[owner] += problem.time(s)(assignment.count(owner, s));
    }
    ASSERT_EQ(placed, problem.num_matrices(s));
  }
  ASSERT_EQ(assignment.loads(), loads);
}

TEST(Exchange, KeepsMatricesAndMaxBytesAndIsNoSlower) {
  int num_faster = 0;
  int num_tight = 0;
  for (int seed = 0; seed < kNumExchangeInstances; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Instance instance = draw_small(random, 30, 6);
    std::int64_t all_bytes = 0;
    for (const CostedShape& shape : instance.shapes) all_bytes += shape.num_matrices * shape.bytes;
    if (seed % 2 == 1) instance.max_bytes = all_bytes / instance.num_owners + 5;
    const Problem problem(instance);
    std::optional<Assignment> assignment = draw_assignment(random, problem);
    if (!assignment) continue;
    num_tight += seed % 2;
    const Nanoseconds before = assignment->makespan();
    exchange(*assignment, 0, 50);
    expect_complete(*assignment);
    EXPECT_LE(assignment->most_bytes(), instance.max_bytes);
    EXPECT_LE(assignment->makespan(), before);
    num_faster += assignment->makespan() < before ? 1 : 0;
  }
  EXPECT_GT(num_faster, kNumExchangeInstances / 6);
  EXPECT_GT(num_tight, kNumExchangeInstances / 8);
}

TEST(Exchange, EndsAtItsTarget) {
  const Problem problem({.shapes = {{8, {{1, 10}}}}, .num_owners = 4});
  Assignment assignment(problem);
  assignment.add(Owner(0), ShapeIndex(0), 8);
  exchange(assignment, 80, 50);
  EXPECT_EQ(assignment.count(Owner(0), ShapeIndex(0)), 8) << "what was good enough is changed";
  exchange(assignment, 0, 50);
  EXPECT_EQ(assignment.makespan(), 20);
}

TEST(Exchange, TakesSomethingBack) {
  // 9 + 9 + 4 against 4 + 5 + 5: a nine for two fives leaves 23 against 13, a nine for the four and
  // a five is not one exchange; a nine for a five alone leaves 18 against 18.
  const Problem problem({.shapes = {{2, {{1, 9}}}, {2, {{1, 4}}}, {2, {{1, 5}}}}, .num_owners = 2});
  Assignment assignment(problem);
  assignment.add(Owner(0), ShapeIndex(0), 2);
  assignment.add(Owner(0), ShapeIndex(1), 1);
  assignment.add(Owner(1), ShapeIndex(1), 1);
  assignment.add(Owner(1), ShapeIndex(2), 2);
  exchange(assignment, 0, 1);
  EXPECT_EQ(assignment.loads(), (PerOwner<Nanoseconds>{18, 18}));
  EXPECT_EQ(assignment.count(Owner(1), ShapeIndex(0)), 1);
  EXPECT_EQ(assignment.count(Owner(0), ShapeIndex(2)), 1);
}

}  // namespace
}  // namespace dmuon::balance
