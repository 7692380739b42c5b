#include "dmuon/balance/verify.h"

#include <gtest/gtest.h>

#include <limits>

namespace dmuon::balance {
namespace {

using Kind = Certificate::Kind;

// Half of all is 24 ns, but no owner's load lies between 22 and 26: the optimum is 26.
const Instance kIndivisible{.shapes = {{3, {{1, 10}}}, {3, {{1, 6}}}}, .num_owners = 2};

// At these prices all work is worth 15, and what fits into 25 ns at most 7, as 10 + 6 + 6.
const Certificate kIndivisibleProof{
    .kind = Kind::kPatterns, .bound = 26, .per_matrix = {3, 2}, .per_ns = {0, 0}, .cells = 25};

// Pairs are cheap: all four take 24 ns, two owners 12 each.
const Instance kPairs{.shapes = {{4, {{1, 10}, {2, 12}}}}, .num_owners = 2};

bool proved(const Instance& instance, const Certificate& certificate) {
  return verify(instance, certificate).empty();
}

Certificate priced(std::int64_t ten, std::int64_t six) {
  Certificate certificate = kIndivisibleProof;
  certificate.per_matrix = {ten, six};
  return certificate;
}

TEST(Verify, AcceptsZeroWithoutProof) {
  EXPECT_TRUE(proved({}, {}));
  EXPECT_TRUE(proved(kPairs, {}));
  // Whatever else it says: 0 holds.
  EXPECT_TRUE(proved(kPairs, {.kind = Kind::kPatterns, .per_matrix = {-1}, .cells = -1}));
}

TEST(Verify, RefusesBoundsOutOfRange) {
  const Instance longest{.shapes = {{1, {{1, kMaxTotalNs}}}}};
  EXPECT_TRUE(proved(longest, {.bound = kMaxTotalNs}));
  for (const Kind kind : {Kind::kOneOwner, Kind::kAllOwners, Kind::kPatterns}) {
    Certificate certificate{
        .kind = kind, .shape = ShapeIndex(0), .per_matrix = {1}, .per_ns = {1}, .cells = 1};
    certificate.bound = -1;
    EXPECT_FALSE(proved(longest, certificate));
    certificate.bound = kMaxTotalNs + 1;
    EXPECT_FALSE(proved(longest, certificate));
    certificate.bound = std::numeric_limits<Nanoseconds>::max();
    EXPECT_FALSE(proved(longest, certificate));
  }
}

TEST(Verify, KnowsWhatOneOwnerTakes) {
  // Five matrices on two owners: somebody has three or more, and four are faster than three.
  const Instance instance{.shapes = {{0, {{1, 99}}}, {5, {{1, 10}, {2, 14}, {4, 20}}}},
                          .num_owners = 2};
  Certificate certificate{.kind = Kind::kOneOwner, .bound = 20, .shape = ShapeIndex(1)};
  EXPECT_TRUE(proved(instance, certificate));
  certificate.bound = 21;
  EXPECT_FALSE(proved(instance, certificate));
  certificate.bound = 20;
  for (const int shape : {-1, 0, 2}) {
    certificate.shape = ShapeIndex(shape);
    EXPECT_FALSE(proved(instance, certificate)) << shape;
  }
}

// An exact share is no more than a share: of four matrices on two owners nobody need have three.
TEST(Verify, GivesOneOwnerNoMoreThanItsShare) {
  EXPECT_TRUE(proved(kPairs, {.kind = Kind::kOneOwner, .bound = 12, .shape = ShapeIndex(0)}));
  EXPECT_FALSE(proved(kPairs, {.kind = Kind::kOneOwner, .bound = 13, .shape = ShapeIndex(0)}));
}

TEST(Verify, KnowsWhatAllOwnersTake) {
  EXPECT_TRUE(proved(kPairs, {.bound = 12}));
  EXPECT_FALSE(proved(kPairs, {.bound = 13}));
  EXPECT_TRUE(proved(kIndivisible, {.bound = 24}));
  EXPECT_FALSE(proved(kIndivisible, {.bound = 25}));
}

// All four in one batch take 21 ns, half of which is 11; but the batch itself takes 21.
TEST(Verify, LeavesOutBatchesBeyondTheLimit) {
  const Instance instance{.shapes = {{4, {{1, 10}, {4, 21}}}}, .num_owners = 2};
  EXPECT_TRUE(proved(instance, {.bound = 20}));
  EXPECT_FALSE(proved(instance, {.bound = 21}));
  const Instance alone{.shapes = {{2, {{1, 10}}}}, .num_owners = 9};
  EXPECT_TRUE(proved(alone, {.bound = 10}));
  EXPECT_FALSE(proved(alone, {.bound = 11}));
}

TEST(Verify, AcceptsPricesThatProve) {
  EXPECT_TRUE(proved(kIndivisible, kIndivisibleProof));
  EXPECT_TRUE(proved(kIndivisible, priced(4, 2)));
  EXPECT_TRUE(proved(kIndivisible, priced(300, 200)));
}

TEST(Verify, RefusesPricesThatDoNot) {
  for (const auto& [ten, six] : {std::pair{2, 2}, {3, 1}, {3, 3}, {6, 2}, {0, 2}, {3, 0}, {0, 0}}) {
    EXPECT_FALSE(proved(kIndivisible, priced(ten, six))) << ten << ", " << six;
  }
  // Equal to what two owners can do is not more than it: 12 and twice 6.
  EXPECT_FALSE(proved(kIndivisible, priced(2, 2)));
}

TEST(Verify, RefusesNegativePrices) {
  EXPECT_FALSE(proved(kIndivisible, priced(-3, 2)));
  EXPECT_FALSE(proved(kIndivisible, priced(3, -2)));
  Certificate certificate = kIndivisibleProof;
  certificate.per_ns = {0, -1};
  EXPECT_EQ(verify(kIndivisible, certificate), "a price is negative");
}

TEST(Verify, RefusesPricesOfOtherShapes) {
  for (const PerShape<std::int64_t>& prices :
       {PerShape<std::int64_t>{}, {3}, {3, 2, 0}, {3, 2, 9}}) {
    Certificate certificate = kIndivisibleProof;
    certificate.per_matrix = prices;
    EXPECT_FALSE(proved(kIndivisible, certificate));
    certificate = kIndivisibleProof;
    certificate.per_ns = prices;
    EXPECT_FALSE(proved(kIndivisible, certificate));
  }
}

TEST(Verify, RefusesPatternsOfALargerBound) {
  Certificate certificate = kIndivisibleProof;
  certificate.cells = 26;
  certificate.bound = 27;
  EXPECT_FALSE(proved(kIndivisible, certificate));
}

TEST(Verify, RefusesCellsOutOfRange) {
  for (const int cells : {0, -1, 26, std::numeric_limits<int>::max()}) {
    Certificate certificate = kIndivisibleProof;
    certificate.cells = cells;
    EXPECT_EQ(verify(kIndivisible, certificate), "cells is out of range") << cells;
  }
  // No limit has no cells.
  Certificate certificate = kIndivisibleProof;
  certificate.bound = 1;
  EXPECT_FALSE(proved(kIndivisible, certificate));
}

// In 5 cells of 5 ns, 10 takes 2 and three of 6 take 3: worth 9 together, though they take 28 ns.
TEST(Verify, RoundsLoadsDown) {
  Certificate certificate = kIndivisibleProof;
  certificate.cells = 5;
  EXPECT_FALSE(proved(kIndivisible, certificate));
  certificate.cells = 12;
  EXPECT_TRUE(proved(kIndivisible, certificate));
}

TEST(Verify, PricesTimeAsWell) {
  Certificate certificate{
      .kind = Kind::kPatterns, .bound = 12, .per_matrix = {0}, .per_ns = {1}, .cells = 11};
  EXPECT_TRUE(proved(kPairs, certificate));
  certificate.bound = 13;
  EXPECT_FALSE(proved(kPairs, certificate));
  // All that time, and no more than that: 24 ns in pairs, not 40 ns alone.
  certificate = {
      .kind = Kind::kPatterns, .bound = 20, .per_matrix = {0}, .per_ns = {1}, .cells = 19};
  EXPECT_FALSE(proved(kPairs, certificate));
}

// What takes no time at all fits always, and is worth something all the same.
TEST(Verify, CountsWhatTakesLessThanACell) {
  const Instance instance{.shapes = {{8, {{1, 0}}}, {2, {{1, 10}}}}, .num_owners = 2};
  EXPECT_FALSE(proved(
      instance,
      {.kind = Kind::kPatterns, .bound = 11, .per_matrix = {1, 1}, .per_ns = {0, 0}, .cells = 2}));
  EXPECT_TRUE(proved(
      instance,
      {.kind = Kind::kPatterns, .bound = 10, .per_matrix = {0, 1}, .per_ns = {0, 0}, .cells = 2}));
}

TEST(Verify, RefusesTheProofOfAnotherInstance) {
  Instance faster = kIndivisible;
  faster.shapes[ShapeIndex(0)].batches[0].ns = 9;  // 9 + 9 + 6 takes 24
  EXPECT_FALSE(proved(faster, kIndivisibleProof));
  Instance fewer = kIndivisible;
  fewer.shapes[ShapeIndex(1)].num_matrices = 2;
  EXPECT_FALSE(proved(fewer, kIndivisibleProof));
  Instance wider = kIndivisible;
  wider.num_owners = 3;
  EXPECT_FALSE(proved(wider, kIndivisibleProof));
}

// What an owner can do is worth 2^122; times the owners that is far beyond 128 bits.
TEST(Verify, ComputesWithThePricesAndOwnersThatFit) {
  constexpr Nanoseconds kLong = kMaxTotalNs / 2;
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  Certificate certificate{.kind = Kind::kPatterns,
                          .bound = kLong + 1,
                          .per_matrix = {kMost},
                          .per_ns = {kMost},
                          .cells = 4096};
  const Instance instance{.shapes = {{1, {{1, kLong}}}},
                          .num_owners = std::numeric_limits<int>::max()};
  EXPECT_FALSE(proved(instance, certificate));
  certificate.bound = kLong;
  EXPECT_TRUE(proved(instance, certificate));
}

}  // namespace
}  // namespace dmuon::balance
