#include "dmuon/engine/packing.h"

#include <gtest/gtest.h>

#include <random>

namespace dmuon::engine {
namespace {

// By hand, on 2 x 2: slots 0 and 2 are column 0, slots 1 and 3 column 1.
TEST(Pack, SortsByColumnThenOwnerThenIndex) {
  const std::vector<MatrixSpec> specs{{2, 3, 0, 3}, {1, 4, 0, 0}, {5, 1, 1, 0},
                                      {2, 2, 0, 2}, {1, 7, 0, 0}, {3, 3, 0, 1}};
  const Packing packing = pack(specs, {0, 1, 3, 4, 5}, 2, 2);
  EXPECT_EQ(packing.matrices, (std::vector<int>{1, 4, 3, 5, 0}));
  EXPECT_EQ(packing.offsets, (std::vector<std::int64_t>{0, 4, 11, 15, 24}));
  EXPECT_EQ(packing.num_elements, 30);
  EXPECT_EQ(packing.columns[0].begin, 0);
  EXPECT_EQ(packing.columns[0].end, 15);
  EXPECT_EQ(packing.columns[1].begin, 15);
  EXPECT_EQ(packing.columns[1].end, 30);
  EXPECT_EQ(packing.owners[0].size(), 11);
  EXPECT_EQ(packing.owners[2].begin, 11);
  EXPECT_EQ(packing.owners[2].size(), 4);
  EXPECT_EQ(packing.owners[1].size(), 9);
  EXPECT_EQ(packing.owners[3].end, 30);
}

TEST(Pack, GivesAnOwnerOfNothingAnEmptySegmentInPlace) {
  const Packing packing = pack({{2, 2, 0, 1}}, {0}, 2, 3);
  ASSERT_EQ(packing.owners.size(), 6U);
  ASSERT_EQ(packing.columns.size(), 3U);
  EXPECT_EQ(packing.columns[0].size(), 0);
  EXPECT_EQ(packing.columns[1].size(), 4);
  EXPECT_EQ(packing.columns[2].begin, 4);
  EXPECT_EQ(packing.columns[2].size(), 0);
  EXPECT_EQ(packing.owners[4].begin, 4);
  EXPECT_EQ(packing.owners[4].size(), 0);
}

// Whatever the owners: every element of the buffer is one matrix's, and lies in its owner's and
// column's segment.
TEST(Pack, TilesTheBufferForAnyOwners) {
  std::mt19937 random(1);
  const auto draw = [&](int end) {
    return static_cast<int>(random() % static_cast<unsigned>(end));
  };
  for (int round = 0; round < 300; ++round) {
    const int num_replicates = 1 + draw(4);
    const int num_shards = 1 + draw(4);
    std::vector<MatrixSpec> specs;
    std::vector<int> matrices;
    const int num_matrices = 1 + draw(9);
    for (int i = 0; i < num_matrices; ++i) {
      specs.push_back({1 + draw(5), 1 + draw(5), 0, draw(num_replicates * num_shards)});
      matrices.push_back(i);
    }
    const Packing packing = pack(specs, matrices, num_replicates, num_shards);
    std::int64_t next = 0;
    for (std::size_t i = 0; i < packing.matrices.size(); ++i) {
      const MatrixSpec& spec = specs[static_cast<std::size_t>(packing.matrices[i])];
      ASSERT_EQ(packing.offsets[i], next);
      next += spec.num_elements();
      const Segment owner = packing.owners[static_cast<std::size_t>(spec.owner)];
      const Segment column = packing.columns[static_cast<std::size_t>(spec.owner % num_shards)];
      ASSERT_TRUE(owner.begin <= packing.offsets[i] && next <= owner.end);
      ASSERT_TRUE(column.begin <= owner.begin && owner.end <= column.end);
    }
    ASSERT_EQ(next, packing.num_elements);
    std::int64_t owned = 0;
    for (const Segment& segment : packing.owners) owned += segment.size();
    ASSERT_EQ(owned, packing.num_elements);
  }
}

}  // namespace
}  // namespace dmuon::engine
