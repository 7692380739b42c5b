#include "dmuon/balance/local_search.h"

#include <gtest/gtest.h>

#include <functional>

#include "dmuon/balance/construct.h"
#include "tests/balance/brute_force.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

constexpr int kNumInstances = 100;

struct Search {
  const char* name;
  std::function<void(Assignment&, Nanoseconds target)> run;
};

std::vector<Search> searches() {
  return {
      {"exchange", [](Assignment& a, Nanoseconds target) { exchange(a, target, 50); }},
      {"divide_pairs", [](Assignment& a, Nanoseconds target) { divide_pairs(a, target, 20, 40); }},
      {"iterate", [](Assignment& a, Nanoseconds target) { iterate(a, target, 100, 0); }},
      {"anneal", [](Assignment& a, Nanoseconds target) { anneal(a, target, 800, 0); }}};
}

// Everything at random owners, as long as it fits.
std::optional<Assignment> draw_assignment(Random& random, const Problem& problem) {
  Assignment assignment(problem);
  for (int s = 0; s < problem.num_shapes(); ++s) {
    for (int i = 0; i < problem.num_matrices(s); ++i) {
      int owner = random.below(problem.num_owners());
      for (int tries = 0; !assignment.fits(owner, s, 1); ++tries) {
        if (tries == problem.num_owners()) return std::nullopt;
        owner = (owner + 1) % problem.num_owners();
      }
      assignment.add(owner, s, 1);
    }
  }
  return assignment;
}

void expect_complete(const Assignment& assignment) {
  const Problem& problem = assignment.problem();
  std::vector<Nanoseconds> loads(static_cast<std::size_t>(problem.num_owners()), 0);
  for (int s = 0; s < problem.num_shapes(); ++s) {
    int placed = 0;
    for (int owner = 0; owner < problem.num_owners(); ++owner) {
      ASSERT_GE(assignment.count(owner, s), 0);
      placed += assignment.count(owner, s);
      loads[static_cast<std::size_t>(owner)] += problem.time(s)(assignment.count(owner, s));
    }
    ASSERT_EQ(placed, problem.num_matrices(s));
  }
  ASSERT_EQ(assignment.loads(), loads);
}

TEST(LocalSearch, KeepsMatricesAndMaxBytesAndIsNoSlower) {
  for (const Search& search : searches()) {
    int num_faster = 0;
    int num_tight = 0;
    for (int seed = 0; seed < kNumInstances; ++seed) {
      SCOPED_TRACE(testing::Message() << search.name << ", seed " << seed);
      Random random(static_cast<std::uint64_t>(seed));
      Instance instance = draw_small(random, 30, 6);
      std::int64_t all_bytes = 0;
      for (const Shape& shape : instance.shapes) all_bytes += shape.num_matrices * shape.bytes;
      if (seed % 2 == 1) instance.max_bytes = all_bytes / instance.num_owners + 5;
      const Problem problem(instance);
      std::optional<Assignment> assignment = draw_assignment(random, problem);
      if (!assignment) continue;
      num_tight += seed % 2;
      const Nanoseconds before = assignment->makespan();
      search.run(*assignment, 0);
      expect_complete(*assignment);
      EXPECT_TRUE(assignment->fits());
      EXPECT_LE(assignment->makespan(), before);
      num_faster += assignment->makespan() < before ? 1 : 0;
      // From where little helps.
      exchange(*assignment, 0, 50);
      const Nanoseconds settled = assignment->makespan();
      search.run(*assignment, 0);
      EXPECT_LE(assignment->makespan(), settled);
    }
    EXPECT_GT(num_faster, kNumInstances / 6) << search.name;
    EXPECT_GT(num_tight, kNumInstances / 8) << search.name;
  }
}

TEST(LocalSearch, EndsAtItsTarget) {
  const Problem problem({.shapes = {{8, {{1, 10}}}}, .num_owners = 4});
  for (const Search& search : searches()) {
    Assignment assignment(problem);
    assignment.add(0, 0, 8);
    search.run(assignment, 80);
    EXPECT_EQ(assignment.count(0, 0), 8) << search.name << " changed what was good enough";
    search.run(assignment, 0);
    EXPECT_EQ(assignment.makespan(), 20) << search.name;
  }
}

TEST(Exchange, TakesSomethingBack) {
  // 9 + 9 + 4 against 4 + 5 + 5: a nine for two fives leaves 23 against 13, a nine for the four and
  // a five is not one exchange; a nine for a five alone leaves 18 against 18.
  const Problem problem({.shapes = {{2, {{1, 9}}}, {2, {{1, 4}}}, {2, {{1, 5}}}}, .num_owners = 2});
  Assignment assignment(problem);
  assignment.add(0, 0, 2);
  assignment.add(0, 1, 1);
  assignment.add(1, 1, 1);
  assignment.add(1, 2, 2);
  exchange(assignment, 0, 1);
  EXPECT_EQ(assignment.loads(), (std::vector<Nanoseconds>{18, 18}));
  EXPECT_EQ(assignment.count(1, 0), 1);
  EXPECT_EQ(assignment.count(0, 2), 1);
}

TEST(DividePair, FindsTheBestDivision) {
  // 3 x 10 + 3 x 6 at one owner: 26 and 22 is the best that two can do.
  const Problem problem({.shapes = {{3, {{1, 10}}}, {3, {{1, 6}}}}, .num_owners = 2});
  Assignment assignment(problem);
  assignment.add(0, 0, 3);
  assignment.add(0, 1, 3);
  EXPECT_TRUE(divide_pair(assignment, 0, 1, 64));
  EXPECT_EQ(assignment.makespan(), 26);
  expect_complete(assignment);
  EXPECT_FALSE(divide_pair(assignment, 0, 1, 64)) << "nothing is better";
}

// In cells of a nanosecond nothing is rounded.
TEST(DividePair, IsExactInSmallCells) {
  int num_divided = 0;
  for (int seed = 0; seed < kNumInstances; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    Instance instance = draw_small(random, 10, 2);
    instance.num_owners = 2;
    const Problem problem(instance);
    Assignment assignment(problem);
    for (int s = 0; s < problem.num_shapes(); ++s) assignment.add(0, s, problem.num_matrices(s));
    if (assignment.makespan() > 20'000) continue;
    const Nanoseconds least = std::min(assignment.makespan(), optimum(instance));
    num_divided += divide_pair(assignment, 0, 1, 20'000) ? 1 : 0;
    EXPECT_EQ(assignment.makespan(), least) << "seed " << seed;
  }
  EXPECT_GT(num_divided, kNumInstances / 4);
}

}  // namespace
}  // namespace dmuon::balance
