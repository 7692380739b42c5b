#include <gtest/gtest.h>

#include <set>

#include "dmuon/core/error.h"
#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"

namespace dmuon::plan {
namespace {

PerParameter<Owner> laid_out(int num_matrices, Mesh mesh) {
  const Inventory inventory = oracle::inventory(std::vector<int>(num_matrices, 0));
  return make_plan(inventory, mesh, "xor_layout", oracle::modelled(inventory)).owner;
}

// Every mesh of up to 9 x 9, so powers of two and others, odd and even numbers of shards.
TEST(XorLayout, OfAnyGConsecutiveMatricesUsesGColumnsAndOfAnyRTimesGEverySlotOnce) {
  for (int replicates = 1; replicates <= 9; ++replicates) {
    for (int shards = 1; shards <= 9; ++shards) {
      SCOPED_TRACE(core::message(replicates, "x", shards));
      const Mesh mesh{replicates, shards};
      const PerParameter<Owner> owner = laid_out(3 * mesh.num_slots(), mesh);
      for (auto first = owner.begin(); first + mesh.num_slots() <= owner.end(); ++first) {
        std::set<Shard> columns;
        for (auto one = first; one != first + shards; ++one) columns.insert(mesh.shard_of(*one));
        ASSERT_EQ(columns.size(), static_cast<std::size_t>(shards));
        ASSERT_EQ(std::set<Owner>(first, first + mesh.num_slots()).size(),
                  static_cast<std::size_t>(mesh.num_slots()));
      }
    }
  }
}

TEST(XorLayout, IsThePapersRuleOnItsFourByEightMesh) {
  const Mesh mesh{4, 8};
  const PerParameter<Owner> owner = laid_out(100, mesh);
  for (const ParameterIndex index : owner.indices()) {
    const int w = index.value();
    EXPECT_EQ(owner[index], mesh.owner_at(Replicate((w % 4) ^ ((w / 8) % 4)), Shard(w % 8), 0));
  }
}

// By hand from eq:comm-layout on 2 x 4: shard = w mod 4, replicate = (w mod 2) xor (w/4 mod 2).
TEST(XorLayout, FollowsTheLayoutWhateverTheShapes) {
  const Inventory inventory = oracle::inventory({0, 3, 0, 1, 1, 2, 0, 5, 0});
  const Plan plan = make_plan(inventory, {2, 4}, "xor_layout", oracle::modelled(inventory));
  EXPECT_EQ(plan.owner, oracle::owners({0, 5, 2, 7, 4, 1, 6, 3, 0}));
}

TEST(XorLayout, TakesTheNextRankOfASlotInTheNextRound) {
  const Inventory inventory = oracle::inventory({0, 0, 0, 0, 0, 0, 0, 0, 0});
  const Plan plan = make_plan(inventory, {2, 2, 2}, "xor_layout", oracle::modelled(inventory));
  // Slots 0 3 2 1, then the other ranks of the same.
  EXPECT_EQ(plan.owner, oracle::owners({0, 6, 4, 2, 1, 7, 5, 3, 0}));
}

}  // namespace
}  // namespace dmuon::plan
