// Local search over pairs of batches.
//
// The sum to lower is that of crowding.h, for nodes times their number and for columns times
// theirs. So a share of a unit that is double the mean counts alike for both. A pass looks at each
// batch in execution order and exchanges it with the later one of the same shape and size that
// lowers the sum most. Sums are of whole numbers, so every machine makes the same exchanges.

#include "dmuon/plan/spread_bytes.h"

#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/plan/crowding.h"

namespace dmuon::plan {
namespace {

using balance::Wide;

constexpr int kMaxPasses = 8;
// Units between the first matrices of batches that are exchanged. More units would let one owner
// have many early batches.
constexpr int kReach = 16;
constexpr int kMostTried = 128;  // batches to exchange one with

// Matrices of one owner and shape that are updated together.
struct Lot {
  Owner owner;
  std::vector<ParameterIndex> members;  // ascending
  std::vector<UnitIndex> units;         // of the members
};

class Search {
 public:
  Search(const Problem& problem, PerParameter<Owner> owner)
      : problem_(problem),
        owner_(std::move(owner)),
        unit_of_(units_of(problem.inventory)),
        nodes_(num_units(unit_of_), problem.mesh.num_replicates, problem.options.lookahead),
        columns_(num_units(unit_of_), problem.mesh.num_shards, problem.options.lookahead) {
    for (const ParameterIndex w : owner_.indices()) add(w, elements(w));
  }

  const PerParameter<Owner>& owner() const { return owner_; }

  // Returns true if it has exchanged anything.
  bool pass(const PerParameter<bool>& movable) {
    bool changed = false;
    for (auto& [key, lots] : exchangeable(movable)) {
      std::stable_sort(lots.begin(), lots.end(),
                       [](const Lot& a, const Lot& b) { return a.members[0] < b.members[0]; });
      for (std::size_t i = 0; i < lots.size(); ++i) {
        const std::size_t best = best_partner(lots, i);
        if (best == i) continue;
        give(lots[i], lots[best].owner);
        give(lots[best], lots[i].owner);
        std::swap(lots[i].owner, lots[best].owner);
        changed = true;
      }
    }
    return changed;
  }

 private:
  using Key = std::tuple<ShapeIndex, int, std::optional<Shard>>;  // shape, size, only column

  static int num_units(const PerParameter<UnitIndex>& unit_of) {
    int most = 0;
    for (const UnitIndex unit : unit_of) most = std::max(most, unit.value() + 1);
    return most;
  }

  Replicate node_of(Owner owner) const { return problem_.mesh.replicate_of(owner); }
  Shard column_of(Owner owner) const { return problem_.mesh.shard_of(owner); }
  std::int64_t elements(ParameterIndex w) const { return problem_.inventory[w].num_elements(); }

  void add(ParameterIndex w, std::int64_t elements) {
    nodes_.add(unit_of_[w], node_of(owner_[w]), elements);
    if (!problem_.inventory[w].column) columns_.add(unit_of_[w], column_of(owner_[w]), elements);
  }

  void give(const Lot& lot, Owner to) {
    for (const ParameterIndex w : lot.members) {
      add(w, -elements(w));
      owner_[w] = to;
      add(w, elements(w));
    }
  }

  // Returns the batches that an owner runs its matrices in, those of movable matrices alone.
  std::map<Key, std::vector<Lot>> exchangeable(const PerParameter<bool>& movable) const {
    std::map<std::pair<ShapeIndex, Owner>, std::vector<ParameterIndex>> owned;
    for (const ParameterIndex w : owner_.indices()) {
      owned[{problem_.groups.shape_of[w], owner_[w]}].push_back(w);
    }
    std::map<Key, std::vector<Lot>> lots;
    for (const auto& [key, members] : owned) {
      const auto [shape, owner] = key;
      auto first = members.begin();
      for (const int size :
           problem_.balance.time(shape).batches(static_cast<int>(members.size()))) {
        Lot lot{owner, std::vector<ParameterIndex>(first, first + size), {}};
        first += size;
        const std::optional<Shard> column = problem_.inventory[lot.members[0]].column;
        bool moves = true;
        for (const ParameterIndex w : lot.members) {
          lot.units.push_back(unit_of_[w]);
          moves = moves && movable[w] && problem_.inventory[w].column == column;
        }
        if (moves) lots[{shape, size, column}].push_back(std::move(lot));
      }
    }
    return lots;
  }

  // Returns the place of the batch whose exchange with lots[i] lowers the sum most, or i.
  std::size_t best_partner(const std::vector<Lot>& lots, std::size_t i) const {
    const Lot& lot = lots[i];
    Wide least = 0;
    std::size_t best = i;
    int num_tried = 0;
    for (std::size_t j = i + 1; j < lots.size() && num_tried < kMostTried; ++j) {
      if (lots[j].units[0].value() > lot.units[0].value() + kReach) break;
      if (lots[j].owner == lot.owner || lots[j].units == lot.units) continue;
      ++num_tried;
      const Wide change = change_by(lot, lots[j]);
      if (change >= least) continue;
      least = change;
      best = j;
    }
    return best;
  }

  // Sums weight() over pairs of a matrix of each.
  Wide weight(const Lot& a, const Lot& b) const {
    Wide sum = 0;
    for (const UnitIndex u : a.units) {
      for (const UnitIndex v : b.units) sum += nodes_.weight(std::abs(u.value() - v.value()));
    }
    return sum;
  }

  // Returns half of what an exchange changes, by an element of each matrix. A matrix no longer
  // meets what stays where it was, but what stays where it comes. Both sums contain the matrices
  // themselves, which is what `own` corrects.
  template <typename Place>
  static Wide change_on(const Crowding<Place>& crowding, const Lot& a, Place from, const Lot& b,
                        Place to, Wide own) {
    if (from == to) return 0;
    Wide change = own;
    for (const UnitIndex unit : a.units) change += crowding.at(unit, to) - crowding.at(unit, from);
    for (const UnitIndex unit : b.units) change += crowding.at(unit, from) - crowding.at(unit, to);
    return change;
  }

  Wide change_by(const Lot& a, const Lot& b) const {
    const Wide own = elements(a.members[0]) * (weight(a, a) + weight(b, b) - 2 * weight(a, b));
    return problem_.mesh.num_replicates *
               change_on(nodes_, a, node_of(a.owner), b, node_of(b.owner), own) +
           problem_.mesh.num_shards *
               change_on(columns_, a, column_of(a.owner), b, column_of(b.owner), own);
  }

  const Problem& problem_;
  PerParameter<Owner> owner_;
  PerParameter<UnitIndex> unit_of_;
  Crowding<Replicate> nodes_;
  Crowding<Shard> columns_;
};

}  // namespace

PerParameter<Owner> with_bytes_spread(const Problem& problem, PerParameter<Owner> owner,
                                      const PerParameter<bool>& movable) {
  Search search(problem, std::move(owner));
  for (int pass = 0; pass < kMaxPasses && search.pass(movable); ++pass) {
  }
  return search.owner();
}

}  // namespace dmuon::plan
