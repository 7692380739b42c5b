#include "dmuon/balance/assignment.h"

#include <gtest/gtest.h>

#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

const Problem kProblem({.shapes = {{6, {{1, 10}, {2, 12}}, 100}, {3, {{1, 5}}, 7}},
                        .num_owners = 3,
                        .max_bytes = 300});

TEST(Assignment, BeginsWithNothing) {
  const Assignment assignment(kProblem);
  EXPECT_EQ(assignment.makespan(), 0);
  EXPECT_EQ(assignment.slowest(), Owner(0));
  EXPECT_EQ(assignment.bytes(Owner(2)), 0);
  EXPECT_EQ(assignment.most_bytes(), 0);
}

TEST(Assignment, CountsTimeByBatchesAndBytesByMatrices) {
  Assignment assignment(kProblem);
  assignment.add(Owner(1), ShapeIndex(0), 3);
  assignment.add(Owner(1), ShapeIndex(1), 1);
  assignment.add(Owner(2), ShapeIndex(1), 2);
  EXPECT_EQ(assignment.count(Owner(1), ShapeIndex(0)), 3);
  EXPECT_EQ(assignment.loads(), (PerOwner<Nanoseconds>{0, 27, 10}));
  EXPECT_EQ(assignment.bytes(Owner(1)), 307);
  EXPECT_EQ(assignment.slowest(), Owner(1));
  EXPECT_EQ(assignment.makespan(), 27);
  EXPECT_EQ(assignment.load_with(Owner(1), ShapeIndex(0), 1), 29);
  EXPECT_EQ(assignment.load_with(Owner(1), ShapeIndex(0), -3), 5);
  EXPECT_EQ(assignment.load(Owner(1)), 27) << "load_with changes nothing";
}

TEST(Assignment, OfEquallySlowOwnersNamesTheFirst) {
  Assignment assignment(kProblem);
  assignment.add(Owner(1), ShapeIndex(1), 1);
  assignment.add(Owner(2), ShapeIndex(1), 1);
  EXPECT_EQ(assignment.slowest(), Owner(1));
}

TEST(Assignment, FitsUpToMaxBytesInclusive) {
  Assignment assignment(kProblem);
  EXPECT_TRUE(assignment.fits(Owner(0), ShapeIndex(0), 3));
  EXPECT_FALSE(assignment.fits(Owner(0), ShapeIndex(0), 4));
  assignment.add(Owner(0), ShapeIndex(0), 3);
  EXPECT_EQ(assignment.most_bytes(), 300);
  EXPECT_FALSE(assignment.fits(Owner(0), ShapeIndex(1), 1));
  EXPECT_TRUE(assignment.fits(Owner(0), ShapeIndex(1), 0));
  assignment.add(Owner(0), ShapeIndex(1), 1);
  EXPECT_EQ(assignment.most_bytes(), 307);
  EXPECT_TRUE(assignment.fits(Owner(0), ShapeIndex(1), -1));
}

}  // namespace
}  // namespace dmuon::balance
