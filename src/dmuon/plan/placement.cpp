#include "dmuon/plan/placement.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/plan/columns.h"
#include "dmuon/plan/window.h"

namespace dmuon::plan {
namespace {

// Limits on counted work, as everywhere in planning.
constexpr std::int64_t kMaxSwapWork = 6'000'000;  // windows looked at
constexpr int kMaxPasses = 6;

using Columns = PerParameter<Shard>;

// Takes matrices in execution order and gives each a column, then a rank of it.
class Sequence {
 public:
  Sequence(const Inventory& inventory, const ShapeGroups& groups,
           const balance::Assignment& assignment, Mesh mesh, const Options& options)
      : inventory_(inventory),
        groups_(groups),
        windows_(inventory, mesh.num_shards, std::max(1, options.lookahead)),
        stock_(mesh.num_shards, PerShape<int>(groups.shapes.size())) {
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
    for (const ParameterIndex w : inventory_.indices()) {
      const ShapeIndex shape = groups_.shape_of[w];
      const Shard column = best_column(w, shape, ++seen[shape]);
      --stock_[column][shape];
      windows_.add(w, column, 1);
      columns.push_back(column);
    }
    return columns;
  }

  /// Swaps columns of two equal matrices while that takes repeats out of units and windows.
  void mend(Columns& columns) {
    PerShape<std::vector<ParameterIndex>> equal(groups_.shapes.size());
    for (const ParameterIndex w : inventory_.indices()) equal[groups_.shape_of[w]].push_back(w);
    std::int64_t work = 0;
    for (int pass = 0; pass < kMaxPasses; ++pass) {
      bool helped = false;
      for (const ParameterIndex w : inventory_.indices()) {
        if (work >= kMaxSwapWork) break;
        if (windows_.repeats(w, columns[w])) {
          helped |= swap_best(w, equal[groups_.shape_of[w]], columns, work);
        }
      }
      if (!helped) return;
    }
  }

 private:
  // The column used least by the unit, then by the window; then the one that is furthest behind in
  // giving out its matrices of the shape, or the end of the order would be left with few columns.
  Shard best_column(ParameterIndex w, ShapeIndex shape, int seen) const {
    using Key = std::tuple<int, int, std::int64_t>;
    std::optional<std::pair<Key, Shard>> best;
    for (const Shard c : stock_.indices()) {
      if (stock_[c][shape] == 0) continue;
      const std::int64_t given = whole_[c][shape] - stock_[c][shape];
      const std::int64_t due = std::int64_t{seen} * whole_[c][shape];
      const Key key(windows_.in_unit(w, c), windows_.in_window(w, c),
                    given * groups_.num_matrices[shape] - due);
      if (!best || key < best->first) best = {key, c};
    }
    core::invariant(best.has_value(), "place: no column is left for '", inventory_[w].name, "'");
    return best->second;
  }

  bool swap_best(ParameterIndex w, const std::vector<ParameterIndex>& equal, Columns& columns,
                 std::int64_t& work) {
    ParameterIndex best = w;
    std::int64_t least = 0;
    for (const ParameterIndex v : equal) {
      if (columns[v] == columns[w]) continue;
      work += windows_.length();
      if (work > kMaxSwapWork) break;
      const std::int64_t change = windows_.change_of_swap(w, columns[w], v, columns[v]);
      if (change >= least) continue;
      least = change;
      best = v;
    }
    if (best == w) return false;
    windows_.swap(w, columns[w], best, columns[best]);
    std::swap(columns[w], columns[best]);
    return true;
  }

  const Inventory& inventory_;
  const ShapeGroups& groups_;
  Windows windows_;
  core::PerShard<PerShape<int>> stock_;  // still to be given
  core::PerShard<PerShape<int>> whole_;
};

// Which rank of its column a matrix goes to. A batch once begun is filled first, so that its
// members lie close in execution order and early layers can be published early; then comes the rank
// that has waited longest, so that nodes rotate.
class Turns {
 public:
  Turns(const balance::Assignment& assignment, Mesh mesh)
      : left_(assignment), mesh_(mesh), last_(mesh.num_owners(), -1), batches_(mesh.num_owners()) {
    const balance::Problem& problem = assignment.problem();
    for (const Owner owner : mesh.owners()) {
      for (const ShapeIndex s : problem.shapes()) {
        batches_[owner].push_back(problem.time(s).batches(assignment.count(owner, s)));
      }
    }
  }

  /// @return nothing if nobody in the column wants the shape.
  std::optional<Owner> take(Shard column, ShapeIndex shape, ParameterIndex now) {
    std::optional<std::tuple<bool, int, Owner>> best;
    for (const Replicate node : mesh_.replicates()) {
      for (int rank = 0; rank < mesh_.tensor_parallel; ++rank) {
        const Owner owner = mesh_.owner_at(node, column, rank);
        if (left_.count(owner, shape) == 0) continue;
        const std::tuple key(!begun(owner, shape), last_[owner], owner);
        if (!best || key < *best) best = key;
      }
    }
    if (!best) return std::nullopt;
    const Owner owner = std::get<Owner>(*best);
    left_.add(owner, shape, -1);
    last_[owner] = now.value();
    return owner;
  }

 private:
  // Whether what is left is no whole number of batches, counted from the last.
  bool begun(Owner owner, ShapeIndex shape) const {
    int left = left_.count(owner, shape);
    const std::vector<int>& batches = batches_[owner][shape];
    for (auto size = batches.rbegin(); size != batches.rend() && left > 0; ++size) left -= *size;
    return left < 0;
  }

  balance::Assignment left_;
  Mesh mesh_;
  core::PerOwner<int> last_;                            // parameter that it was given last
  core::PerOwner<PerShape<std::vector<int>>> batches_;  // sizes, largest first
};

}  // namespace

PerParameter<Owner> place(const Inventory& inventory, const ShapeGroups& groups,
                          const balance::Assignment& assignment, Mesh mesh,
                          const Options& options) {
  const balance::Assignment arranged = columns_alike(assignment, mesh);
  Sequence sequence(inventory, groups, arranged, mesh, options);
  Columns columns = sequence.columns();
  sequence.mend(columns);
  Turns turns(arranged, mesh);
  PerParameter<Owner> owners;
  for (const ParameterIndex w : inventory.indices()) {
    const std::optional<Owner> owner = turns.take(columns[w], groups.shape_of[w], w);
    core::invariant(owner.has_value(), "place: no owner is left for '", inventory[w].name, "'");
    owners.push_back(*owner);
  }
  return owners;
}

}  // namespace dmuon::plan
