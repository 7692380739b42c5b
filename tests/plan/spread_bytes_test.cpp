#include "dmuon/plan/spread_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "dmuon/plan/crowding.h"
#include "dmuon/plan/placement.h"
#include "dmuon/plan/plan.h"
#include "tests/plan/oracle.h"
#include "tests/plan/random_case.h"

namespace dmuon::plan {
namespace {

// Everything that a strategy gets, with batches of one if `singly`.
struct Given {
  explicit Given(const Case& drawn, bool singly = false)
      : drawn_case(drawn), groups(group_by_shape(drawn.inventory)), balance(instance(singly)) {}

  balance::Instance instance(bool singly) const {
    auto made = instance_of(groups, drawn_case.costs, drawn_case.mesh.num_owners(), "muon");
    if (singly) {
      for (balance::CostedShape& shape : made.shapes) shape.batches.resize(1);
    }
    return made;
  }
  Problem problem() const {
    return {drawn_case.inventory, groups, balance, drawn_case.mesh, drawn_case.options};
  }

  Case drawn_case;
  ShapeGroups groups;
  balance::Problem balance;
};

PerParameter<Owner> draw_owners(balance::Random& random, const Case& drawn) {
  PerParameter<Owner> owner;
  for (const Parameter& parameter : drawn.inventory) {
    const Mesh mesh = drawn.mesh;
    owner.emplace_back(draw(random, 0, mesh.num_owners() - 1));
    if (!parameter.column) continue;
    owner.back() = mesh.owner_at(mesh.replicate_of(owner.back()), *parameter.column, 0);
  }
  return owner;
}

PerParameter<bool> all(const Inventory& inventory, bool value = true) {
  return PerParameter<bool>(inventory.size(), value);
}

// The sum from its definition: squares over units, as often as a window
// has units, and over windows of which the first and the last hang over the ends.
balance::Wide recount(const Case& drawn, const PerParameter<Owner>& owner) {
  std::map<int, int> place_of;
  for (const Parameter& parameter : drawn.inventory) {
    place_of.try_emplace(parameter.unit, static_cast<int>(place_of.size()));
  }
  const auto num_units = static_cast<int>(place_of.size());
  const int window = std::min(std::max(1, drawn.options.lookahead), num_units);
  const auto squares = [&](int first, int last) {
    std::map<std::pair<bool, int>, balance::Wide> elements;
    for (const ParameterIndex w : owner.indices()) {
      const Parameter& parameter = drawn.inventory[w];
      const int place = place_of[parameter.unit];
      if (place < first || place > last) continue;
      elements[{true, drawn.mesh.replicate_of(owner[w]).value()}] += parameter.num_elements();
      if (parameter.column) continue;
      elements[{false, drawn.mesh.shard_of(owner[w]).value()}] += parameter.num_elements();
    }
    balance::Wide sum = 0;
    for (const auto& [place, size] : elements) {
      sum += size * size * (place.first ? drawn.mesh.num_replicates : drawn.mesh.num_shards);
    }
    return sum;
  };
  balance::Wide sum = 0;
  for (int unit = 0; unit < num_units; ++unit) sum += window * squares(unit, unit);
  for (int last = 0; last < num_units + window - 1; ++last) sum += squares(last - window + 1, last);
  return sum;
}

TEST(Crowding, AddsUpToTheSquaresOverUnitsAndWindows) {
  balance::Random random(21);
  for (int trial = 0; trial < 100; ++trial) {
    const Case drawn = draw_case(random);
    const PerParameter<Owner> owner = draw_owners(random, drawn);
    const PerParameter<UnitIndex> unit_of = units_of(drawn.inventory);
    const int num_units = group_by_unit(drawn.inventory).size();
    Crowding<Replicate> nodes(num_units, drawn.mesh.num_replicates, drawn.options.lookahead);
    Crowding<Shard> columns(num_units, drawn.mesh.num_shards, drawn.options.lookahead);
    for (const ParameterIndex w : owner.indices()) {
      const std::int64_t elements = drawn.inventory[w].num_elements();
      nodes.add(unit_of[w], drawn.mesh.replicate_of(owner[w]), elements);
      columns.add(unit_of[w], drawn.mesh.shard_of(owner[w]), elements);
    }
    balance::Wide sum = 0;
    for (const ParameterIndex w : owner.indices()) {
      const auto at_node = nodes.at(unit_of[w], drawn.mesh.replicate_of(owner[w]));
      const auto at_column = columns.at(unit_of[w], drawn.mesh.shard_of(owner[w]));
      sum +=
          drawn.inventory[w].num_elements() * (balance::Wide{at_node} * drawn.mesh.num_replicates +
                                               balance::Wide{at_column} * drawn.mesh.num_shards);
    }
    ASSERT_TRUE(sum == recount(drawn, owner)) << trial;
  }
}

TEST(SpreadBytes, LowersTheSumAndChangesNoLoad) {
  balance::Random random(22);
  int num_lowered = 0;
  for (int trial = 0; trial < 100; ++trial) {
    const Given given(draw_case(random));
    const Case& drawn = given.drawn_case;
    const PerParameter<Owner> before = draw_owners(random, drawn);
    const PerParameter<Owner> after =
        with_bytes_spread(given.problem(), before, all(drawn.inventory));
    std::map<std::pair<ShapeIndex, Owner>, int> counts;
    for (const ParameterIndex w : before.indices()) {
      ++counts[{given.groups.shape_of[w], before[w]}];
      --counts[{given.groups.shape_of[w], after[w]}];
    }
    for (const auto& [key, count] : counts) ASSERT_EQ(count, 0);
    ASSERT_TRUE(recount(drawn, after) <= recount(drawn, before)) << trial;
    num_lowered += recount(drawn, after) < recount(drawn, before) ? 1 : 0;
    ASSERT_EQ(after, with_bytes_spread(given.problem(), before, all(drawn.inventory)));
    ASSERT_EQ(before, with_bytes_spread(given.problem(), before, all(drawn.inventory, false)));
  }
  EXPECT_GT(num_lowered, 50);
}

TEST(SpreadBytes, KeepsParametersInTheirOnlyColumn) {
  balance::Random random(23);
  for (int trial = 0; trial < 60; ++trial) {
    Case drawn = draw_case(random);
    for (Parameter& parameter : drawn.inventory) {
      if (draw(random, 0, 2) > 0) continue;
      parameter.column = Shard(draw(random, 0, drawn.mesh.num_shards - 1));
    }
    const Given given(drawn);
    const PerParameter<Owner> before = draw_owners(random, drawn);
    PerParameter<bool> movable;
    for (const Parameter& one : drawn.inventory) movable.push_back(one.column.has_value());
    const PerParameter<Owner> after = with_bytes_spread(given.problem(), before, movable);
    for (const ParameterIndex w : after.indices()) {
      if (movable[w]) {
        ASSERT_EQ(drawn.mesh.shard_of(after[w]), drawn.mesh.shard_of(before[w]));
      } else {
        ASSERT_EQ(after[w], before[w]);
      }
    }
    ASSERT_TRUE(recount(drawn, after) <= recount(drawn, before)) << trial;
  }
}

// Two units of two batches of two: each unit's batches are on one node, and change with the
// other's.
TEST(SpreadBytes, ExchangesWholeBatches) {
  Case drawn;
  for (int w = 0; w < 8; ++w) {
    drawn.inventory.push_back({std::to_string(w), {1, 4, 4}, w / 4});
  }
  drawn.mesh = {2, 2};
  drawn.options.lookahead = 1;
  drawn.costs = {"by hand", {{{4, 4}, {{1, 5}, {2, 6}}}}};
  const Given given(drawn);
  const auto before = oracle::owners({0, 0, 1, 1, 2, 2, 3, 3});
  const auto after = with_bytes_spread(given.problem(), before, all(drawn.inventory));
  for (const int w : {0, 2, 4, 6}) {
    EXPECT_EQ(after[ParameterIndex(w)], after[ParameterIndex(w + 1)]) << "batches stay together";
  }
  for (const int unit : {0, 4}) {
    const Owner one = after[ParameterIndex(unit)];
    const Owner other = after[ParameterIndex(unit + 2)];
    EXPECT_NE(drawn.mesh.replicate_of(one), drawn.mesh.replicate_of(other));
    EXPECT_NE(drawn.mesh.shard_of(one), drawn.mesh.shard_of(other));
  }
}

// The counts of each owner, whoever it is: placement may number owners anew.
using Counts = std::vector<std::vector<int>>;
Counts counts_of(const Given& given, const std::vector<int>& owner) {
  Counts counts(static_cast<std::size_t>(given.drawn_case.mesh.num_owners()),
                std::vector<int>(static_cast<std::size_t>(given.groups.shapes.size())));
  for (std::size_t w = 0; w < owner.size(); ++w) {
    const ShapeIndex shape = given.groups.shape_of[ParameterIndex(w)];
    ++counts[static_cast<std::size_t>(owner[w])][shape.position()];
  }
  std::sort(counts.begin(), counts.end());
  return counts;
}

// Two to three units of matrices in two sizes, one of them three times the other.
Case draw_tiny(balance::Random& random) {
  Case drawn;
  const int num_units = draw(random, 2, 3);
  for (int w = 0; w < 7; ++w) {
    const bool large = draw(random, 0, 2) == 0;
    drawn.inventory.push_back({std::to_string(w), {1, large ? 6 : 2, 2}, w * num_units / 7});
  }
  drawn.mesh = draw(random, 0, 1) == 0 ? Mesh{2, 2} : Mesh{3, 1};
  drawn.options.lookahead = draw(random, 1, 2);
  for (const Shape& shape : group_by_shape(drawn.inventory).shapes) {
    drawn.costs.shapes.push_back({shape, {{1, 10}}});
  }
  return drawn;
}

TEST(Place, IsCloseToTheMostEvenOfAllPlacements) {
  balance::Random random(24);
  constexpr int kTrials = 60;
  double sum_of_ratios = 0;
  int num_best = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    const Given given(draw_tiny(random));
    const Case& drawn = given.drawn_case;
    balance::Assignment assignment(given.balance);
    std::vector<int> owner(static_cast<std::size_t>(drawn.inventory.size()));
    for (std::size_t w = 0; w < owner.size(); ++w) {
      owner[w] = draw(random, 0, drawn.mesh.num_owners() - 1);
      assignment.add(Owner(owner[w]), given.groups.shape_of[ParameterIndex(w)], 1);
    }
    const Counts counts = counts_of(given, owner);
    const auto found =
        recount(drawn, place(drawn.inventory, given.groups, assignment, drawn.mesh, drawn.options));
    balance::Wide least = found;
    std::fill(owner.begin(), owner.end(), 0);
    for (std::size_t digit = 0; digit < owner.size();) {
      if (counts_of(given, owner) == counts) {
        least = std::min(least, recount(drawn, oracle::owners(owner)));
      }
      for (digit = 0; digit < owner.size() && ++owner[digit] == drawn.mesh.num_owners(); ++digit) {
        owner[digit] = 0;
      }
    }
    const double ratio = static_cast<double>(found) / static_cast<double>(least);
    sum_of_ratios += ratio;
    num_best += found == least ? 1 : 0;
    EXPECT_LE(ratio, 1.2) << trial;
  }
  std::printf("most even: %d of %d, mean ratio %.4f\n", num_best, kTrials, sum_of_ratios / kTrials);
  EXPECT_LE(sum_of_ratios / kTrials, 1.01);
  EXPECT_GE(num_best, kTrials * 4 / 5);
}

}  // namespace
}  // namespace dmuon::plan
