#include "dmuon/layout/packing.h"

#include <gtest/gtest.h>

#include <random>

#include "dmuon/core/error.h"

namespace dmuon::layout {
namespace {

using core::LeafIndex;
using core::ParameterIndex;
using core::Shard;
using core::Slot;
using core::UnitIndex;

OwnedParameter parameter(std::int64_t rows, std::int64_t cols, int unit, int owner) {
  return {{"", {1, rows, cols}, unit}, Slot(owner)};
}

Packing packed(const Parameters& parameters, Mesh mesh, bool pads = false) {
  return pack(parameters, leaves_of(parameters), UnitIndex(0), mesh, pads);
}

std::vector<Segment> in_unit(const Packing& packing) {
  std::vector<Segment> segments;
  for (const PackedParameter& packed : packing.parameters) segments.push_back(packed.in_unit);
  return segments;
}

std::vector<Segment> in_column(const Packing& packing) {
  std::vector<Segment> segments;
  for (const PackedParameter& packed : packing.parameters) segments.push_back(packed.in_column);
  return segments;
}

// By hand, on 2 x 2: slots 0 and 2 are column 0, slots 1 and 3 column 1.
TEST(Pack, SortsByColumnThenOwnerThenIndex) {
  const Parameters parameters{parameter(2, 3, 0, 3),   parameter(1, 4, 0, 0),
                              parameter(5, 1, 1, 0),   parameter(2, 2, 0, 2),
                              parameter(1, 300, 0, 0), parameter(3, 3, 0, 1)};
  const Packing packing = packed(parameters, {2, 2});
  std::vector<int> order;
  for (const PackedParameter& one : packing.parameters) order.push_back(one.index.value());
  EXPECT_EQ(order, (std::vector<int>{1, 4, 3, 5, 0}));
  EXPECT_EQ(in_unit(packing),
            (std::vector<Segment>{{0, 4}, {128, 428}, {512, 516}, {640, 649}, {768, 774}}));
  EXPECT_EQ(packing.num_elements, 896);
  EXPECT_EQ(packing.columns.values(), (std::vector<Part>{{{{0, 640}}}, {{{640, 896}}}}));
  EXPECT_EQ(packing.owners.values(),
            (std::vector<Part>{{{{0, 512}}}, {{{640, 768}}}, {{{512, 640}}}, {{{768, 896}}}}));

  EXPECT_EQ(packing.parts_of(Shard(1)), (std::vector<Part>{{{{0, 128}}}, {{{128, 256}}}}));
}

// By hand, on 2 x 2, between parameters 0 and 4 a leaf of three with owners 3, 1 and 3.
TEST(Pack, PutsAfterTheOthersALeafOfSeveralOwners) {
  Parameters parameters{parameter(2, 3, 0, 3), parameter(2, 5, 0, 3), parameter(30, 5, 0, 1),
                        parameter(1, 5, 0, 3), parameter(1, 4, 0, 0)};
  parameters[ParameterIndex(2)].continues = parameters[ParameterIndex(3)].continues = true;
  const Leaves leaves = leaves_of(parameters);
  ASSERT_EQ(leaves.size(), 3);
  EXPECT_EQ(leaves[LeafIndex(1)].sizes, (std::vector<std::int64_t>{165}));
  const Packing packing = packed(parameters, {2, 2});
  EXPECT_EQ(packing.leaves.values(),
            (std::vector<PackedLeaf>{{LeafIndex(2), 0}, {LeafIndex(0), 128}, {LeafIndex(1), 256}}));
  EXPECT_EQ(in_unit(packing),
            (std::vector<Segment>{{0, 4}, {128, 134}, {256, 266}, {266, 416}, {416, 421}}));
  EXPECT_EQ(packing.num_elements, 512);
  EXPECT_EQ(packing.columns.values(),
            (std::vector<Part>{{{{0, 128}}}, {{{266, 416}, {128, 266}, {416, 512}}}}));
  EXPECT_EQ(packing.owners.values(),
            (std::vector<Part>{{{{0, 128}}}, {{{266, 416}}}, {}, {{{128, 266}, {416, 512}}}}));
  EXPECT_EQ(in_column(packing),
            (std::vector<Segment>{{0, 4}, {150, 156}, {278, 288}, {0, 150}, {288, 293}}));
  EXPECT_EQ(packing.parts_of(Shard(1)), (std::vector<Part>{{{{0, 150}}}, {{{150, 384}}}}));
}

// By hand, on 2 x 2, beside a parameter of owner 1 a leaf of [4, 15] of which columns 0 and 1 have
// two rows each: owners 2 and 0 one, owner 3 both.
TEST(Pack, LaysWhatColumnsKeepForThemselvesInOnePlace) {
  Parameters parameters{parameter(2, 3, 0, 1), parameter(1, 15, 0, 2), parameter(1, 15, 0, 0),
                        parameter(2, 15, 0, 3)};
  for (const int i : {1, 2, 3}) {
    parameters[ParameterIndex(i)].continues = i > 1;
    parameters[ParameterIndex(i)].column = Shard(i / 3);
  }
  const Leaf leaf = leaves_of(parameters, {{{2, 3}, {4, 15}}})[LeafIndex(1)];
  EXPECT_EQ(leaf.local_sizes(), (std::vector<std::int64_t>{2, 15}));
  const Packing packing = packed(parameters, {2, 2});
  EXPECT_EQ(in_unit(packing), (std::vector<Segment>{{0, 6}, {128, 143}, {143, 158}, {128, 158}}));
  EXPECT_EQ(packing.num_elements, 256);
  EXPECT_EQ(packing.columns.values(), (std::vector<Part>{{}, {{{0, 128}}}}));
  EXPECT_EQ(packing.kept.values(), (std::vector<Part>{{{{143, 256}, {128, 143}}}, {{{128, 256}}}}));
  EXPECT_EQ(packing.owners.values(),
            (std::vector<Part>{{{{143, 256}}}, {{{0, 128}}}, {{{128, 143}}}, {{{128, 256}}}}));
  EXPECT_EQ(in_column(packing), (std::vector<Segment>{{0, 6}, {113, 128}, {0, 15}, {128, 158}}));
  EXPECT_EQ(packing.parts_of(Shard(0)), (std::vector<Part>{{{{0, 113}}}, {{{113, 128}}}}));
  EXPECT_EQ(packing.parts_of(Shard(1)), (std::vector<Part>{{{{0, 128}}}, {{{128, 256}}}}));
}

TEST(Part, CountsItsElementsThroughItsSegments) {
  const Part part{{{4, 6}, {9, 12}}};
  for (const auto& [place, element] : {std::pair(0, 4), {1, 5}, {2, 9}, {4, 11}})
    EXPECT_EQ(part.element_at(place), element);
  EXPECT_THROW(part.element_at(5), core::InternalError);
}

TEST(Pack, RefusesLeavesThatDoNotFit) {
  Parameters parameters{parameter(2, 5, 0, 0), parameter(2, 6, 0, 0)};
  parameters[ParameterIndex(1)].continues = true;
  EXPECT_EQ(leaves_of(parameters, {{{11, 2}}})[LeafIndex(0)].sizes,
            (std::vector<std::int64_t>{11, 2}));
  EXPECT_THROW(leaves_of(parameters, {{{11, 3}}}), core::InternalError);
  EXPECT_THROW(leaves_of(parameters, {{{11, 2}}, {{11, 2}}}), core::InternalError);
  parameters[ParameterIndex(1)].unit = 1;
  EXPECT_THROW(leaves_of(parameters), core::InternalError);
  Leaf odd{UnitIndex(0), {}, {3, 2}, 2};
  EXPECT_THROW(odd.local_sizes(), core::InternalError);
  parameters[ParameterIndex(0)].continues = true;
  EXPECT_THROW(leaves_of(parameters), core::InternalError);
}

TEST(Pack, GivesAnOwnerOfNothingAnEmptyPart) {
  const Packing packing = packed({parameter(2, 2, 0, 1)}, {2, 3});
  ASSERT_EQ(packing.owners.size(), 6);
  ASSERT_EQ(packing.columns.size(), 3);
  EXPECT_EQ(packing.columns[Shard(0)].size(), 0);
  EXPECT_EQ(packing.columns[Shard(1)].size(), 128);
  EXPECT_EQ(packing.columns[Shard(2)].size(), 0);
  EXPECT_EQ(packing.owners[Slot(4)].size(), 0);
}

// By hand, on 2 x 2: leaves of 128 and 256 aligned elements, in the order of their owners 0, 2,
// 1, 3.
TEST(Pack, MakesNearEqualPartsOfOwnersEqual) {
  const Parameters parameters{parameter(8, 128, 0, 0), parameter(8, 128, 0, 2),
                              parameter(7, 128, 0, 1), parameter(8, 128, 0, 3)};
  const Packing packing = packed(parameters, {2, 2}, /*pads=*/true);
  EXPECT_EQ(in_unit(packing),
            (std::vector<Segment>{{0, 1024}, {1024, 2048}, {2048, 2944}, {3072, 4096}}));
  EXPECT_EQ(packing.num_elements, 4096);
  EXPECT_TRUE(equal_parts(packing.columns.values(), packing.num_elements));
  for (const Shard column : {Shard(0), Shard(1)}) {
    EXPECT_EQ(packing.column_elements(column), 2048);
    EXPECT_TRUE(equal_parts(packing.parts_of(column), packing.column_elements(column)));
  }
  EXPECT_EQ(in_column(packing)[3], (Segment{1024, 2048})) << "behind the gap";
}

TEST(Pack, MakesColumnsEqualIfOnlyTheirOwnersDiffer) {
  const Parameters parameters{parameter(2, 128, 0, 0), parameter(6, 128, 0, 2),
                              parameter(4, 128, 0, 1), parameter(3, 128, 0, 3)};
  const Packing packing = packed(parameters, {2, 2}, /*pads=*/true);
  EXPECT_EQ(packing.num_elements, 2048);
  EXPECT_TRUE(equal_parts(packing.columns.values(), packing.num_elements));
  EXPECT_EQ(packing.owners[Slot(3)].size(), 512) << "its gap makes the column as long";
  EXPECT_FALSE(equal_parts(packing.parts_of(Shard(0)), packing.column_elements(Shard(0))));
}

TEST(Pack, PadsNothingThatDiffersMoreOrHasSeveralOwners) {
  const auto as_without = [](const Parameters& parameters) {
    const Packing plain = packed(parameters, {1, 2});
    const Packing padded = packed(parameters, {1, 2}, /*pads=*/true);
    return plain.num_elements == padded.num_elements && in_unit(plain) == in_unit(padded);
  };
  EXPECT_TRUE(as_without({parameter(4, 128, 0, 0), parameter(3, 128, 0, 1)}));
  EXPECT_TRUE(as_without({parameter(4, 128, 0, 0)})) << "a column has nothing";
  Parameters divided{parameter(8, 128, 0, 0), parameter(7, 128, 0, 1), parameter(1, 128, 0, 0),
                     parameter(1, 128, 0, 1)};
  EXPECT_FALSE(as_without(divided));
  divided[ParameterIndex(3)].continues = true;
  EXPECT_TRUE(as_without(divided));
}

TEST(EqualParts, AreOneAfterTheOther) {
  EXPECT_TRUE(equal_parts({{{{0, 2}}}, {{{2, 4}}}}, 4));
  EXPECT_FALSE(equal_parts({{{{2, 4}}}, {{{0, 2}}}}, 4));
  EXPECT_FALSE(equal_parts({{{{0, 2}}}, {{{2, 4}}}}, 5));
  EXPECT_FALSE(equal_parts({{{{0, 1}, {1, 2}}}, {{{2, 4}}}}, 4));
  EXPECT_FALSE(equal_parts({{}, {}}, 0));
}

// Whatever the owners: leaves follow each other at the next aligned element, and parameters in them
// without a gap; each in its owner's and column's parts, and these tile the buffer.
TEST(Pack, TilesTheBufferForAnyOwners) {
  std::mt19937 random(1);
  const auto draw = [&](int end) {
    return static_cast<int>(random() % static_cast<unsigned>(end));
  };
  const auto holds = [](const Part& part, const Segment& segment) {
    return std::any_of(part.segments.begin(), part.segments.end(), [&](const Segment& of) {
      return of.begin <= segment.begin && segment.end <= of.end;
    });
  };
  for (int round = 0; round < 300; ++round) {
    const int num_replicates = 1 + draw(4);
    const int num_shards = 1 + draw(4);
    Parameters parameters;
    const int num_parameters = 1 + draw(9);
    for (int i = 0; i < num_parameters; ++i) {
      const bool continues = i > 0 && draw(3) == 0;
      const std::int64_t cols = continues ? parameters.back().view.cols : 1 + draw(20);
      parameters.push_back(parameter(1 + draw(20), cols, 0, draw(num_replicates * num_shards)));
      parameters.back().continues = continues;
    }
    const Packing packing = packed(parameters, {num_replicates, num_shards});
    ASSERT_EQ(packing.parameters.size(), num_parameters);
    std::int64_t next = 0;
    for (const PackedIndex place : packing.parameters.indices()) {
      const OwnedParameter& packed = parameters[packing.parameters[place].index];
      const Segment segment = packing.parameters[place].in_unit;
      if (!packed.continues) next = (next + 127) / 128 * 128;
      ASSERT_EQ(segment, (Segment{next, next + packed.num_elements()}));
      next = segment.end;
      ASSERT_TRUE(holds(packing.owners[packed.owner], segment));
      ASSERT_TRUE(holds(packing.columns[Shard(packed.owner.value() % num_shards)], segment));
    }
    ASSERT_EQ((next + 127) / 128 * 128, packing.num_elements);
    const Packing padded = packed(parameters, {num_replicates, num_shards}, /*pads=*/true);
    ASSERT_LE(8 * (padded.num_elements - packing.num_elements), packing.num_elements);
    if (padded.num_elements > packing.num_elements) {
      ASSERT_TRUE(equal_parts(padded.columns.values(), padded.num_elements));
    }
    for (const auto& parts : {packing.owners.values(), packing.columns.values()}) {
      std::vector<bool> held(static_cast<std::size_t>(packing.num_elements));
      for (const Part& part : parts) {
        for (const Segment& segment : part.segments) {
          for (auto i = segment.begin; i < segment.end; ++i) {
            ASSERT_FALSE(held[static_cast<std::size_t>(i)]);
            held[static_cast<std::size_t>(i)] = true;
          }
        }
      }
      ASSERT_EQ(std::count(held.begin(), held.end(), true), packing.num_elements);
    }
  }
}

}  // namespace
}  // namespace dmuon::layout
