#include "dmuon/engine/packing.h"

#include <gtest/gtest.h>

#include <random>

#include "dmuon/core/error.h"

namespace dmuon::engine {
namespace {

using core::ParameterIndex;
using core::Shard;
using core::Slot;
using core::UnitIndex;

Parameter parameter(std::int64_t rows, std::int64_t cols, int unit, int owner) {
  return {{1, rows, cols}, UnitIndex(unit), Slot(owner)};
}

// By hand, on 2 x 2: slots 0 and 2 are column 0, slots 1 and 3 column 1.
TEST(Pack, SortsByColumnThenOwnerThenIndex) {
  const Parameters parameters{parameter(2, 3, 0, 3),   parameter(1, 4, 0, 0),
                              parameter(5, 1, 1, 0),   parameter(2, 2, 0, 2),
                              parameter(1, 300, 0, 0), parameter(3, 3, 0, 1)};
  const Packing packing = pack(parameters, UnitIndex(0), 2, 2);
  std::vector<int> order;
  for (const ParameterIndex index : packing.parameters) order.push_back(index.value());
  EXPECT_EQ(order, (std::vector<int>{1, 4, 3, 5, 0}));
  EXPECT_EQ(packing.segments.values(),
            (std::vector<Segment>{{0, 4}, {128, 428}, {512, 516}, {640, 649}, {768, 774}}));
  EXPECT_EQ(packing.num_elements, 896);
  EXPECT_EQ(packing.columns.values(), (std::vector<Segment>{{0, 640}, {640, 896}}));
  EXPECT_EQ(packing.owners.values(),
            (std::vector<Segment>{{0, 512}, {640, 768}, {512, 640}, {768, 896}}));

  EXPECT_EQ(packing.place_of(ParameterIndex(3)), PackedIndex(2));
  EXPECT_THROW(packing.place_of(ParameterIndex(2)), core::InternalError);
  EXPECT_EQ(packing.parts_of(Shard(1)), (std::vector<Segment>{{0, 128}, {128, 256}}));
}

TEST(Pack, GivesAnOwnerOfNothingAnEmptySegmentInPlace) {
  const Packing packing = pack({parameter(2, 2, 0, 1)}, UnitIndex(0), 2, 3);
  ASSERT_EQ(packing.owners.size(), 6);
  ASSERT_EQ(packing.columns.size(), 3);
  EXPECT_EQ(packing.columns[Shard(0)].size(), 0);
  EXPECT_EQ(packing.columns[Shard(1)].size(), 128);
  EXPECT_EQ(packing.columns[Shard(2)].begin, 128);
  EXPECT_EQ(packing.columns[Shard(2)].size(), 0);
  EXPECT_EQ(packing.owners[Slot(4)].begin, 128);
  EXPECT_EQ(packing.owners[Slot(4)].size(), 0);
}

// Whatever the owners: parameters follow each other at the next aligned element, each in its
// owner's and column's segment, and these tile the buffer.
TEST(Pack, TilesTheBufferForAnyOwners) {
  std::mt19937 random(1);
  const auto draw = [&](int end) {
    return static_cast<int>(random() % static_cast<unsigned>(end));
  };
  for (int round = 0; round < 300; ++round) {
    const int num_replicates = 1 + draw(4);
    const int num_shards = 1 + draw(4);
    Parameters parameters;
    const int num_parameters = 1 + draw(9);
    for (int i = 0; i < num_parameters; ++i)
      parameters.push_back(
          parameter(1 + draw(20), 1 + draw(20), 0, draw(num_replicates * num_shards)));
    const Packing packing = pack(parameters, UnitIndex(0), num_replicates, num_shards);
    std::int64_t next = 0;
    for (const PackedIndex place : packing.parameters.indices()) {
      const Parameter& packed = parameters[packing.parameters[place]];
      const Segment segment = packing.segments[place];
      ASSERT_EQ(segment, (Segment{next, next + packed.num_elements()}));
      next = (segment.end + 127) / 128 * 128;
      const Segment owner = packing.owners[packed.owner];
      const Segment column = packing.columns[Shard(packed.owner.value() % num_shards)];
      ASSERT_TRUE(owner.begin <= segment.begin && next <= owner.end);
      ASSERT_TRUE(column.begin <= owner.begin && owner.end <= column.end);
    }
    ASSERT_EQ(packing.parameters.size(), num_parameters);
    ASSERT_EQ(next, packing.num_elements);
    std::int64_t owned = 0;
    for (const Segment& segment : packing.owners) owned += segment.size();
    ASSERT_EQ(owned, packing.num_elements);
  }
}

}  // namespace
}  // namespace dmuon::engine
