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
  EXPECT_EQ(assignment.slowest(), 0);
  EXPECT_EQ(assignment.bytes(2), 0);
  EXPECT_TRUE(assignment.fits());
}

TEST(Assignment, CountsTimeByBatchesAndBytesByMatrices) {
  Assignment assignment(kProblem);
  assignment.add(1, 0, 3);
  assignment.add(1, 1, 1);
  assignment.add(2, 1, 2);
  EXPECT_EQ(assignment.count(1, 0), 3);
  EXPECT_EQ(assignment.loads(), (std::vector<Nanoseconds>{0, 27, 10}));
  EXPECT_EQ(assignment.bytes(1), 307);
  EXPECT_EQ(assignment.slowest(), 1);
  EXPECT_EQ(assignment.makespan(), 27);
  EXPECT_EQ(assignment.load_with(1, 0, 1), 29);
  EXPECT_EQ(assignment.load_with(1, 0, -3), 5);
  EXPECT_EQ(assignment.load(1), 27) << "load_with changes nothing";
}

TEST(Assignment, OfEquallySlowOwnersNamesTheFirst) {
  Assignment assignment(kProblem);
  assignment.add(1, 1, 1);
  assignment.add(2, 1, 1);
  EXPECT_EQ(assignment.slowest(), 1);
}

TEST(Assignment, FitsUpToMaxBytesInclusive) {
  Assignment assignment(kProblem);
  EXPECT_TRUE(assignment.fits(0, 0, 3));
  EXPECT_FALSE(assignment.fits(0, 0, 4));
  assignment.add(0, 0, 3);
  EXPECT_TRUE(assignment.fits(0));
  EXPECT_FALSE(assignment.fits(0, 1, 1));
  EXPECT_TRUE(assignment.fits(0, 1, 0));
  assignment.add(0, 1, 1);
  EXPECT_FALSE(assignment.fits(0));
  EXPECT_FALSE(assignment.fits());
  EXPECT_TRUE(assignment.fits(1));
  EXPECT_TRUE(assignment.fits(0, 1, -1));
}

TEST(Assignment, SignaturesTellCountsApart) {
  Assignment assignment(kProblem);
  assignment.add(0, 0, 2);
  assignment.add(1, 0, 1);
  assignment.add(1, 0, 1);
  EXPECT_EQ(assignment.signature(0), assignment.signature(1));
  assignment.add(1, 1, 1);
  EXPECT_NE(assignment.signature(0), assignment.signature(1));
  assignment.add(1, 1, -1);
  EXPECT_EQ(assignment.signature(0), assignment.signature(1));
  assignment.add(2, 1, 2);
  EXPECT_NE(assignment.signature(0), assignment.signature(2)) << "as many, of another shape";
}

}  // namespace
}  // namespace dmuon::balance
