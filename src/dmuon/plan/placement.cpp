#include "dmuon/plan/placement.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/core/grid.h"
#include "dmuon/plan/columns.h"
#include "dmuon/plan/window.h"

namespace dmuon::plan {
namespace {

// Limits on counted work, as everywhere in planning.
constexpr std::int64_t kMaxSwapWork = 6'000'000;  // windows looked at
constexpr int kMaxPasses = 6;

// Takes matrices in execution order and gives each a column, then a rank of it.
class Sequence {
 public:
  Sequence(const Inventory& inventory, const ShapeGroups& groups,
           const balance::Assignment& assignment, Mesh mesh, int window)
      : inventory_(inventory),
        groups_(groups),
        mesh_(mesh),
        windows_(inventory, mesh.num_shards, window),
        stock_(mesh.num_shards, num_shapes()) {
    for (int owner = 0; owner < mesh.num_owners(); ++owner) {
      for (int s = 0; s < num_shapes(); ++s) {
        stock_(mesh.shard_of(owner), s) += assignment.count(owner, s);
      }
    }
    whole_ = stock_;
  }

  std::vector<int> columns() {
    std::vector<int> columns;
    std::vector<int> seen(groups_.shapes.size(), 0);
    for (std::size_t w = 0; w < inventory_.size(); ++w) {
      const int shape = groups_.shape_of[w];
      ++seen[static_cast<std::size_t>(shape)];
      const int column = best_column(w, shape, seen[static_cast<std::size_t>(shape)]);
      --stock_(column, shape);
      windows_.add(w, column, 1);
      columns.push_back(column);
    }
    return columns;
  }

  /// Swaps columns of two equal matrices while that takes repeats out of units and windows.
  void mend(std::vector<int>& columns) {
    std::vector<std::vector<std::size_t>> places(groups_.shapes.size());
    for (std::size_t w = 0; w < inventory_.size(); ++w) {
      places[static_cast<std::size_t>(groups_.shape_of[w])].push_back(w);
    }
    std::int64_t work = 0;
    for (int pass = 0; pass < kMaxPasses; ++pass) {
      bool helped = false;
      for (std::size_t w = 0; w < inventory_.size() && work < kMaxSwapWork; ++w) {
        if (!windows_.repeats(w, columns[w])) continue;
        helped |=
            swap_best(w, places[static_cast<std::size_t>(groups_.shape_of[w])], columns, work);
      }
      if (!helped) return;
    }
  }

 private:
  int num_shapes() const { return static_cast<int>(groups_.shapes.size()); }

  // The column used least by the unit, then by the window; then the one that is furthest behind in
  // giving out its matrices of the shape, or the end of the order would be left with few columns.
  int best_column(std::size_t w, int shape, int seen) const {
    int best = -1;
    std::array<std::int64_t, 3> best_key{};
    for (int c = 0; c < mesh_.num_shards; ++c) {
      if (stock_(c, shape) == 0) continue;
      const std::int64_t given = whole_(c, shape) - stock_(c, shape);
      const std::int64_t due = std::int64_t{seen} * whole_(c, shape);
      const std::int64_t all = groups_.num_matrices[static_cast<std::size_t>(shape)];
      const std::array<std::int64_t, 3> key = {windows_.in_unit(w, c), windows_.in_window(w, c),
                                               given * all - due};
      if (best >= 0 && key >= best_key) continue;
      best = c;
      best_key = key;
    }
    core::invariant(best >= 0, "place: no column is left for '", inventory_[w].name, "'");
    return best;
  }

  bool swap_best(std::size_t w, const std::vector<std::size_t>& places, std::vector<int>& columns,
                 std::int64_t& work) {
    std::size_t best = w;
    std::int64_t least = 0;
    for (const std::size_t v : places) {
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
  Mesh mesh_;
  Windows windows_;
  core::Grid<int> stock_;  // [columns][shapes] still to be given
  core::Grid<int> whole_;  // [columns][shapes]
};

// Which rank of its column a matrix goes to. A batch once begun is filled first, so that its
// members lie close in execution order and early layers can be published early; then comes the rank
// that has waited longest, so that nodes rotate.
class Turns {
 public:
  Turns(const balance::Assignment& assignment, Mesh mesh)
      : left_(assignment),
        mesh_(mesh),
        last_(static_cast<std::size_t>(mesh.num_owners()), -1),
        batches_(mesh.num_owners(), assignment.problem().num_shapes()) {
    for (int owner = 0; owner < mesh.num_owners(); ++owner) {
      for (int s = 0; s < assignment.problem().num_shapes(); ++s) {
        batches_(owner, s) = assignment.problem().time(s).batches(assignment.count(owner, s));
      }
    }
  }

  /// @return -1 if nobody in the column wants the shape.
  int take(int column, int shape, std::int64_t now) {
    int best = -1;
    std::pair<bool, std::int64_t> best_key;
    for (int i = 0; i < mesh_.num_replicates * mesh_.tensor_parallel; ++i) {
      const int owner =
          owner_index({i / mesh_.tensor_parallel, column}, i % mesh_.tensor_parallel, mesh_);
      if (left_.count(owner, shape) == 0) continue;
      const std::pair<bool, std::int64_t> key = {!begun(owner, shape),
                                                 last_[static_cast<std::size_t>(owner)]};
      if (best >= 0 && key >= best_key) continue;
      best = owner;
      best_key = key;
    }
    if (best < 0) return best;
    left_.add(best, shape, -1);
    last_[static_cast<std::size_t>(best)] = now;
    return best;
  }

 private:
  // Whether what is left is no whole number of batches, counted from the last.
  bool begun(int owner, int shape) const {
    int left = left_.count(owner, shape);
    const std::vector<int>& batches = batches_(owner, shape);
    for (std::size_t b = batches.size(); b-- > 0 && left > 0;) left -= batches[b];
    return left < 0;
  }

  balance::Assignment left_;
  Mesh mesh_;
  std::vector<std::int64_t> last_;        // [owners] when it was given something last
  core::Grid<std::vector<int>> batches_;  // [owners][shapes] sizes, largest first
};

}  // namespace

std::vector<int> place(const Inventory& inventory, const ShapeGroups& groups,
                       const balance::Assignment& assignment, Mesh mesh, const Options& options) {
  const balance::Assignment arranged = columns_alike(assignment, mesh);
  Sequence sequence(inventory, groups, arranged, mesh, std::max(1, options.lookahead));
  std::vector<int> columns = sequence.columns();
  sequence.mend(columns);
  Turns turns(arranged, mesh);
  std::vector<int> owners;
  for (std::size_t w = 0; w < inventory.size(); ++w) {
    owners.push_back(turns.take(columns[w], groups.shape_of[w], static_cast<std::int64_t>(w)));
    core::invariant(owners.back() >= 0, "place: no owner is left for '", inventory[w].name, "'");
  }
  return owners;
}

Spread spread(const Inventory& inventory, Mesh mesh, const std::vector<int>& owner,
              const Options& options) {
  std::vector<int> columns;
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(mesh.num_shards), 0);
  for (std::size_t w = 0; w < owner.size(); ++w) {
    columns.push_back(mesh.shard_of(owner[w]));
    bytes[static_cast<std::size_t>(columns[w])] +=
        inventory[w].num_elements() * options.weight_bytes;
  }
  const WindowFigures figures =
      window_figures(inventory, mesh.num_shards, columns, std::max(1, options.lookahead));
  return {figures.distinct, figures.repeats, figures.busiest, 0, std::move(bytes)};
}

}  // namespace dmuon::plan
