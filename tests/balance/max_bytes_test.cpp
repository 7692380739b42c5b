// max_bytes is kept wherever solve() finds a way to, and named where not.

#include <gtest/gtest.h>

#include <string>

#include "dmuon/balance/solve.h"
#include "dmuon/core/error.h"
#include "tests/balance/brute_force.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

// Few: bounds leave max_bytes out, so searches rarely know that they could end.
constexpr int kNumMaxBytesInstances = 30;

// The refusal of solve(); empty if there is a solution, which keeps to max_bytes.
std::string refusal_with_bytes(const Instance& instance) {
  try {
    const Problem problem(instance);
    const Solution solution = solve(problem);
    EXPECT_LE(solution.assignment.most_bytes(), instance.max_bytes);
    for (const Owner owner : problem.owners()) {
      EXPECT_LE(solution.assignment.bytes(owner), instance.max_bytes);
    }
    return {};
  } catch (const core::InvalidArgument& error) {
    return error.what();
  }
}

std::int64_t all_bytes(const Instance& instance) {
  std::int64_t sum = 0;
  for (const CostedShape& shape : instance.shapes) sum += shape.num_matrices * shape.bytes;
  return sum;
}

TEST(MaxBytes, IsKeptOrRefusedWithANumberThatWorks) {
  int num_refused = 0;
  int num_slower = 0;
  for (int seed = 0; seed < kNumMaxBytesInstances; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Instance instance = draw_model(random, 3, 3);
    const Nanoseconds unlimited = optimum(instance);
    instance.max_bytes = sufficient_bytes(Problem(instance)) * draw(random, 80, 100) / 100;
    const Nanoseconds least = optimum(instance);
    const std::string refused = refusal_with_bytes(instance);
    num_slower += least > unlimited ? 1 : 0;
    if (refused.empty()) {
      EXPECT_GE(least, 0) << "nobody can keep to it";
      continue;
    }
    ++num_refused;
    const std::int64_t sufficient = sufficient_bytes(Problem(instance));
    EXPECT_GT(sufficient, instance.max_bytes);
    EXPECT_NE(refused.find("max_bytes"), std::string::npos) << refused;
    EXPECT_NE(refused.find(core::message("With ", sufficient, " ")), std::string::npos) << refused;
    instance.max_bytes = sufficient;
    EXPECT_EQ(refusal_with_bytes(instance), "");
  }
  EXPECT_GE(num_refused, 2);
  EXPECT_GE(num_slower, 2) << "too few instances in which it matters";
}

TEST(MaxBytes, IsKeptByLargerInstances) {
  int num_tight = 0;
  for (int seed = 0; seed < 6; ++seed) {
    SCOPED_TRACE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Instance instance = draw_model(random, 12, 6);
    instance.max_bytes = sufficient_bytes(Problem(instance));
    EXPECT_EQ(refusal_with_bytes(instance), "");
    num_tight += instance.max_bytes < all_bytes(instance) / instance.num_owners * 5 / 4 ? 1 : 0;
  }
  EXPECT_GE(num_tight, 2);
}

// The batch of two would balance the third matrix, but nobody has room for both.
TEST(MaxBytes, OutweighsTime) {
  Instance instance{.shapes = {{2, {{1, 10}, {2, 11}}, 100}, {1, {{1, 11}}, 1}}, .num_owners = 2};
  EXPECT_EQ(solve(Problem(instance)).assignment.makespan(), 11);
  instance.max_bytes = 150;
  EXPECT_EQ(solve(Problem(instance)).assignment.makespan(), 21);
}

TEST(MaxBytes, ZeroSufficesForMatricesWithoutBytes) {
  const Problem problem({.shapes = {{3, {{1, 4}}, 0}}, .num_owners = 2, .max_bytes = 0});
  EXPECT_EQ(sufficient_bytes(problem), 0);
  EXPECT_EQ(solve(problem).assignment.makespan(), 8);
}

}  // namespace
}  // namespace dmuon::balance
