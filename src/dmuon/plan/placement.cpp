#include "dmuon/plan/placement.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/plan/crowding.h"
#include "dmuon/plan/spread_bytes.h"

namespace dmuon::plan {
namespace {

using balance::Assignment;
using Columns = PerParameter<Shard>;

// Returns the column of each owner of the assignment. Columns are alike if the sum of the squares
// of their counts is small. So owners with most matrices come first, each where it adds least to
// the sum.
core::PerOwner<Shard> give_columns(const Assignment& assignment, Mesh mesh) {
  const core::Indices<ShapeIndex> shapes = assignment.problem().shapes();
  core::PerOwner<Shard> column_of(mesh.num_owners());
  core::PerShard<int> free(mesh.num_shards, mesh.num_replicates * mesh.tensor_parallel);
  core::PerShard<PerShape<std::int64_t>> held(
      mesh.num_shards, PerShape<std::int64_t>(assignment.problem().num_matrices().size()));
  for (const Owner owner : core::sorted_by(mesh.owners(), [&](Owner one) {
         const PerShape<int>& counts = assignment.counts(one);
         return -std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
       })) {
    std::optional<std::pair<std::int64_t, Shard>> best;
    for (const Shard column : mesh.shards()) {
      if (free[column] == 0) continue;
      std::int64_t added = 0;
      for (const ShapeIndex s : shapes) added += assignment.count(owner, s) * held[column][s];
      if (!best || added < best->first) best = {added, column};
    }
    const Shard column = best->second;
    --free[column];
    column_of[owner] = column;
    for (const ShapeIndex s : shapes) held[column][s] += assignment.count(owner, s);
  }
  return column_of;
}

// Gives each matrix a column, in execution order.
class Sequence {
 public:
  Sequence(const Inventory& inventory, const ShapeGroups& groups, const Assignment& assignment,
           Mesh mesh, const PlanOptions& options)
      : groups_(groups),
        unit_of_(units_of(inventory)),
        stock_(mesh.num_shards, PerShape<int>(groups.shapes.size())) {
    const int num_units = group_by_unit(inventory).size();
    placed_.resize(num_units, core::PerShard<int>(mesh.num_shards));
    window_ = std::min(std::max(1, options.lookahead), num_units);
    for (const Owner owner : mesh.owners()) {
      for (const ShapeIndex s : groups.shapes.indices()) {
        stock_[mesh.shard_of(owner)][s] += assignment.count(owner, s);
      }
    }
    whole_ = stock_;
  }

  Columns columns() {
    Columns columns;
    PerShape<int> seen(groups_.shapes.size());
    for (const ParameterIndex w : unit_of_.indices()) {
      const ShapeIndex shape = groups_.shape_of[w];
      const Shard column = best_column(unit_of_[w], shape, ++seen[shape]);
      --stock_[column][shape];
      ++placed_[unit_of_[w]][column];
      columns.push_back(column);
    }
    return columns;
  }

 private:
  // Chooses the column that the unit uses least, then the window. Among equals it chooses the one
  // that is furthest behind with its matrices of the shape; otherwise few columns would remain at
  // the end.
  Shard best_column(UnitIndex unit, ShapeIndex shape, int seen) const {
    using Key = std::tuple<int, int, std::int64_t>;
    std::optional<std::pair<Key, Shard>> best;
    for (const Shard c : stock_.indices()) {
      if (stock_[c][shape] == 0) continue;
      const std::int64_t given = whole_[c][shape] - stock_[c][shape];
      const std::int64_t due = std::int64_t{seen} * whole_[c][shape];
      const Key key(placed_[unit][c], in_window(unit, c),
                    given * groups_.num_matrices[shape] - due);
      if (!best || key < best->first) best = {key, c};
    }
    core::invariant(best.has_value(), "place: no column is left for a matrix of ",
                    to_string(groups_.shapes[shape]));
    return best->second;
  }

  // Counts matrices on a column, in the window that ends with the unit.
  int in_window(UnitIndex unit, Shard column) const {
    int sum = 0;
    for (int u = std::max(0, unit.value() - window_ + 1); u <= unit.value(); ++u) {
      sum += placed_[UnitIndex(u)][column];
    }
    return sum;
  }

  const ShapeGroups& groups_;
  PerParameter<UnitIndex> unit_of_;  // numbered by the order of first matrices
  core::Vector<UnitIndex, core::PerShard<int>> placed_;
  int window_;                           // units
  core::PerShard<PerShape<int>> stock_;  // matrices not given yet
  core::PerShard<PerShape<int>> whole_;
};

// Gives each matrix a rank of its column.
// - First fills a batch that has begun. So its members are close in execution order and early
//   layers can be published early.
// - Otherwise chooses the node that has least of the unit and of its window. So a unit travels in
//   both directions of each link. Ranks that are ahead with the shape, by a matrix or more, wait.
// - Among equals chooses the rank that has waited longest.
class Turns {
 public:
  Turns(const Inventory& inventory, const Assignment& assignment, Mesh mesh,
        const PlanOptions& options)
      : inventory_(inventory),
        unit_of_(units_of(inventory)),
        whole_(assignment),
        left_(assignment),
        mesh_(mesh),
        last_(mesh.num_owners(), -1),
        batches_(mesh.num_owners()),
        crowding_(group_by_unit(inventory).size(), mesh.num_replicates, options.lookahead) {
    const balance::Problem& problem = assignment.problem();
    given_.resize(mesh.num_shards, PerShape<std::int64_t>(problem.num_matrices().size()));
    stock_ = given_;
    for (const Owner owner : mesh.owners()) {
      for (const ShapeIndex s : problem.shapes()) {
        batches_[owner].push_back(problem.time(s).batches(assignment.count(owner, s)));
        stock_[mesh.shard_of(owner)][s] += assignment.count(owner, s);
      }
    }
  }

  /// @return std::nullopt if no rank of the column wants the shape.
  std::optional<Owner> take(Shard column, ShapeIndex shape, ParameterIndex now) {
    ++given_[column][shape];
    std::optional<std::tuple<bool, bool, std::int64_t, int, Owner>> best;
    for (const Replicate node : mesh_.replicates()) {
      for (int rank = 0; rank < mesh_.tensor_parallel; ++rank) {
        const Owner owner = mesh_.owner_at(node, column, rank);
        if (left_.count(owner, shape) == 0) continue;
        const std::tuple key(!begun(owner, shape), ahead(owner, shape),
                             crowding_.at(unit_of_[now], node), last_[owner], owner);
        if (!best || key < *best) best = key;
      }
    }
    if (!best) return std::nullopt;
    const Owner owner = std::get<Owner>(*best);
    left_.add(owner, shape, -1);
    last_[owner] = now.value();
    crowding_.add(unit_of_[now], mesh_.replicate_of(owner), inventory_[now].num_elements());
    return owner;
  }

 private:
  // True if the remaining matrices are no whole number of batches, counted from the last batch.
  bool begun(Owner owner, ShapeIndex shape) const {
    int left = left_.count(owner, shape);
    const std::vector<int>& batches = batches_[owner][shape];
    for (auto size = batches.rbegin(); size != batches.rend() && left > 0; ++size) left -= *size;
    return left < 0;
  }

  // True if it has a larger share of its matrices than its column has of those of all its ranks,
  // this one included.
  bool ahead(Owner owner, ShapeIndex shape) const {
    const Shard column = mesh_.shard_of(owner);
    const std::int64_t whole = whole_.count(owner, shape);
    return (whole - left_.count(owner, shape)) * stock_[column][shape] >
           given_[column][shape] * whole;
  }

  const Inventory& inventory_;
  PerParameter<UnitIndex> unit_of_;
  Assignment whole_;
  Assignment left_;
  Mesh mesh_;
  core::PerOwner<int> last_;                            // parameter that it got last
  core::PerOwner<PerShape<std::vector<int>>> batches_;  // sizes, largest first
  core::PerShard<PerShape<std::int64_t>> given_;        // matrices so far
  core::PerShard<PerShape<std::int64_t>> stock_;        // all matrices
  Crowding<Replicate> crowding_;
};

}  // namespace

// In each column gives the owner with most bytes to the node with fewest bytes so far.
Assignment columns_alike(const Assignment& assignment, Mesh mesh) {
  const core::PerOwner<Shard> column_of = give_columns(assignment, mesh);
  Assignment result(assignment.problem());
  core::Vector<Replicate, std::int64_t> node_bytes(mesh.num_replicates);
  core::PerShard<int> num_placed(mesh.num_shards);
  std::vector<Replicate> nodes;
  for (const Owner owner : core::sorted_by(mesh.owners(), [&](Owner one) {
         return std::pair(column_of[one], -assignment.bytes(one));
       })) {
    const int place = num_placed[column_of[owner]]++;
    if (place == 0) {
      nodes = core::sorted_by(mesh.replicates(), [&](Replicate node) { return node_bytes[node]; });
    }
    const Replicate node = nodes.begin()[place % mesh.num_replicates];
    node_bytes[node] += assignment.bytes(owner);
    const Owner rank = mesh.owner_at(node, column_of[owner], place / mesh.num_replicates);
    for (const ShapeIndex s : assignment.problem().shapes()) {
      result.add(rank, s, assignment.count(owner, s));
    }
  }
  return result;
}

PerParameter<Owner> place(const Inventory& inventory, const ShapeGroups& groups,
                          const Assignment& assignment, Mesh mesh, const PlanOptions& options) {
  const Assignment arranged = columns_alike(assignment, mesh);
  const Columns columns = Sequence(inventory, groups, arranged, mesh, options).columns();
  Turns turns(inventory, arranged, mesh, options);
  PerParameter<Owner> owners;
  for (const ParameterIndex w : inventory.indices()) {
    const std::optional<Owner> owner = turns.take(columns[w], groups.shape_of[w], w);
    core::invariant(owner.has_value(), "place: no owner is left for '", inventory[w].name, "'");
    owners.push_back(*owner);
  }
  const Problem problem{inventory, groups, assignment.problem(), mesh, options};
  return with_bytes_spread(problem, std::move(owners), PerParameter<bool>(inventory.size(), true));
}

}  // namespace dmuon::plan
