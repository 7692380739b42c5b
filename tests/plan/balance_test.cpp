#include "dmuon/plan/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

struct Instance {
  std::vector<int> shape_of;
  oracle::Costs costs;
  int num_slots;
  ShapeGroups groups;
  CostTable table;
};

Instance make(std::vector<int> shape_of, oracle::Costs costs, int num_slots) {
  Instance instance{std::move(shape_of), std::move(costs), num_slots, {}, {}};
  instance.groups.shape_of = instance.shape_of;
  for (int s = 0; s < static_cast<int>(instance.costs.size()); ++s) {
    const auto count =
        static_cast<int>(std::count(instance.shape_of.begin(), instance.shape_of.end(), s));
    instance.groups.shapes.push_back({s + 1, s + 1});
    instance.groups.num_matrices.push_back(count);
    instance.table.emplace_back(instance.costs[s], count);
  }
  return instance;
}

// Up to 6 matrices of up to 3 shapes on up to 3 slots; arbitrary costs of batches of up to 3, or
// costs without any gain from batching.
Instance random_instance(std::mt19937& random, bool batching) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const int num_shapes = draw(1, batching ? 3 : 6);
  std::vector<int> shape_of(draw(1, 6));
  for (int& shape : shape_of) shape = draw(0, num_shapes - 1);
  oracle::Costs costs(num_shapes);
  for (auto& batch_seconds : costs) {
    const int one = draw(1, 20);
    for (int b = 1; b <= 3; ++b) batch_seconds.push_back(batching ? draw(1, 20) : b * one);
  }
  return make(shape_of, costs, draw(1, 3));
}

TEST(LowerBoundSeconds, AreNeverAboveTheOptimumWhateverTheCosts) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const Instance i = random_instance(random, trial % 2 == 0);
    EXPECT_LE(lower_bound_seconds(i.groups, i.table, i.num_slots),
              oracle::optimum(i.shape_of, i.costs, i.num_slots));
  }
}

TEST(LowerBoundSeconds, AreTheLargestMatrixOrTheMeanOfTheBestBatches) {
  const Instance one = make({0, 1}, {{9}, {1}}, 2);
  EXPECT_DOUBLE_EQ(lower_bound_seconds(one.groups, one.table, 2), 9);
  // Two pairs at 4 each are cheaper than four at 3 each.
  const Instance mean = make({0, 0, 0, 0}, {{3, 4}}, 2);
  EXPECT_NEAR(lower_bound_seconds(mean.groups, mean.table, 2), 4, 1e-8);
}

// Graham 1969: LPT is within 4/3 - 1/(3 slots) of the optimum where costs merely add up.
TEST(Deal, OfSingleMatricesMeetsGrahamsBoundWhereBatchingGainsNothing) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 300; ++trial) {
    const Instance i = random_instance(random, false);
    Balance balance(i.table, {1, i.num_slots});
    balance.deal(i.groups, piece_sizes(i.groups, i.table, 0));
    const double bound = 4.0 / 3 - 1.0 / (3 * i.num_slots);
    EXPECT_LE(balance.makespan_seconds(),
              bound * oracle::optimum(i.shape_of, i.costs, i.num_slots) * (1 + 1e-12));
  }
}

// Loads 5 5 4 4 3 3 3 on 3 slots: optimum 9, LPT 11, exactly the proven bound.
TEST(Deal, IsElevenOnGrahamsWorstCaseAndImproveReachesNine) {
  const Instance i = make({0, 0, 1, 1, 2, 2, 2}, {{5}, {4}, {3}}, 3);
  Balance balance(i.table, {1, 3});
  balance.deal(i.groups, piece_sizes(i.groups, i.table, 0));
  EXPECT_DOUBLE_EQ(balance.makespan_seconds(), 11);
  balance.improve();
  EXPECT_DOUBLE_EQ(balance.makespan_seconds(), 9);
}

TEST(PieceSizes, AreTheMostMatricesThatFitInTheTimeAndAtLeastOne) {
  const Instance i = make({0, 0, 0, 1}, {{3, 4}, {9}}, 1);
  EXPECT_EQ(piece_sizes(i.groups, i.table, 0), (std::vector<int>{1, 1}));
  EXPECT_EQ(piece_sizes(i.groups, i.table, 4), (std::vector<int>{2, 1}));
  EXPECT_EQ(piece_sizes(i.groups, i.table, 7), (std::vector<int>{3, 1}));
}

TEST(Deal, KeepsMatricesOfOnePieceTogether) {
  // One batch of two takes 4, two single ones 6.
  const Instance i = make({0, 0, 0, 0}, {{3, 4}}, 2);
  Balance balance(i.table, {1, 2});
  balance.deal(i.groups, piece_sizes(i.groups, i.table, 4));
  EXPECT_EQ(balance.counts().at(0, 0), 2);
  EXPECT_EQ(balance.counts().at(0, 1), 2);
  EXPECT_DOUBLE_EQ(balance.makespan_seconds(), 4);
}

TEST(Deal, OfEqualMatricesGoesRoundTheSlotsEvenly) {
  const Instance i = make(std::vector<int>(24, 0), {{1}}, 12);
  Balance balance(i.table, {3, 4});
  balance.deal(i.groups, piece_sizes(i.groups, i.table, 0));
  for (int t = 0; t < 12; ++t) EXPECT_EQ(balance.counts().at(0, t), 2);
}

TEST(Improve, NeverGrowsTheMakespanNorLosesAMatrixAndAgreesWithTheOracle) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 300; ++trial) {
    const Instance i = random_instance(random, true);
    Balance balance(i.table, {i.num_slots, 1});
    balance.deal(i.groups, piece_sizes(i.groups, i.table, trial % 20));
    const double before = balance.makespan_seconds();
    balance.improve();
    EXPECT_LE(balance.makespan_seconds(), before);

    std::vector<int> shape_of;
    std::vector<int> owner;
    for (int s = 0; s < static_cast<int>(i.costs.size()); ++s) {
      for (int t = 0; t < i.num_slots; ++t) {
        ASSERT_GE(balance.counts().at(s, t), 0);
        shape_of.insert(shape_of.end(), balance.counts().at(s, t), s);
        owner.insert(owner.end(), balance.counts().at(s, t), t);
      }
    }
    std::vector<int> expected = i.shape_of;
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(shape_of, expected);
    EXPECT_EQ(balance.makespan_seconds(), oracle::makespan(shape_of, i.costs, owner, i.num_slots));
  }
}

}  // namespace
}  // namespace dmuon::plan
