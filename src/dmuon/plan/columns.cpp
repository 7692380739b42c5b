#include "dmuon/plan/columns.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "dmuon/core/grid.h"

namespace dmuon::plan {
namespace {

using balance::Assignment;
using balance::Nanoseconds;

// A limit on counted work; one on time would make plans depend on the machine.
constexpr std::int64_t kMaxSwapTries = 4'000'000;

// Matrices of each shape on each column, scaled by the number of columns so that the even share is
// whole: off(c, s) = columns * count - all.
class Table {
 public:
  Table(const Assignment& assignment, int num_columns)
      : num_columns_(num_columns), off_(num_columns, assignment.problem().num_shapes()) {
    for (int c = 0; c < num_columns; ++c) {
      for (int s = 0; s < assignment.problem().num_shapes(); ++s) {
        off_(c, s) = -std::int64_t{assignment.problem().num_matrices(s)};
      }
    }
  }

  void add(int column, int shape, int count) {
    off_(column, shape) += std::int64_t{num_columns_} * count;
  }

  /// How much the sum of all squares changes if `count` matrices more come to a column; 128 bits
  /// are not needed: counts are below 2^31 and columns few.
  double change(int column, int shape, int count) const {
    const double added = static_cast<double>(num_columns_) * count;
    return added * (2 * static_cast<double>(off_(column, shape)) + added);
  }

 private:
  int num_columns_;
  core::Grid<std::int64_t> off_;  // [columns][shapes]
};

// Owners go to columns, the fullest first, each where it mends most.
class Arrangement {
 public:
  Arrangement(const Assignment& assignment, Mesh mesh)
      : assignment_(assignment),
        mesh_(mesh),
        table_(assignment, mesh.num_shards),
        column_of_(static_cast<std::size_t>(mesh.num_owners())) {
    give_columns();
    swap_columns();
  }

  /// Column after column, the owner with most to do goes to the node that has least so far.
  Assignment arranged() const {
    Assignment result(assignment_.problem());
    std::vector<Nanoseconds> node_loads(static_cast<std::size_t>(mesh_.num_replicates), 0);
    for (int column = 0; column < mesh_.num_shards; ++column) {
      const std::vector<int> owners = owners_of(column);
      std::vector<int> nodes(static_cast<std::size_t>(mesh_.num_replicates));
      std::iota(nodes.begin(), nodes.end(), 0);
      const std::vector<Nanoseconds> before = node_loads;
      std::stable_sort(nodes.begin(), nodes.end(), [&](int a, int b) {
        return before[static_cast<std::size_t>(a)] < before[static_cast<std::size_t>(b)];
      });
      for (std::size_t i = 0; i < owners.size(); ++i) {
        const int node = nodes[i % nodes.size()];
        const auto member = static_cast<int>(i / nodes.size());
        const int owner = owner_index({node, column}, member, mesh_);
        node_loads[static_cast<std::size_t>(node)] += assignment_.load(owners[i]);
        for (int s = 0; s < num_shapes(); ++s) {
          result.add(owner, s, assignment_.count(owners[i], s));
        }
      }
    }
    return result;
  }

 private:
  int num_shapes() const { return assignment_.problem().num_shapes(); }

  // The longest first, ties by index.
  std::vector<int> owners_of(int column) const {
    std::vector<int> owners;
    for (int owner = 0; owner < mesh_.num_owners(); ++owner) {
      if (column_of_[static_cast<std::size_t>(owner)] == column) owners.push_back(owner);
    }
    std::stable_sort(owners.begin(), owners.end(),
                     [&](int a, int b) { return assignment_.load(a) > assignment_.load(b); });
    return owners;
  }

  double change(int owner, int column, int sign) const {
    double sum = 0;
    for (int s = 0; s < num_shapes(); ++s) {
      sum += table_.change(column, s, sign * assignment_.count(owner, s));
    }
    return sum;
  }

  void put(int owner, int column, int sign) {
    for (int s = 0; s < num_shapes(); ++s) {
      table_.add(column, s, sign * assignment_.count(owner, s));
    }
  }

  void give_columns() {
    std::vector<std::int64_t> held(column_of_.size(), 0);
    for (int owner = 0; owner < mesh_.num_owners(); ++owner) {
      for (int s = 0; s < num_shapes(); ++s) {
        held[static_cast<std::size_t>(owner)] += assignment_.count(owner, s);
      }
    }
    std::vector<int> order(column_of_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return held[static_cast<std::size_t>(a)] > held[static_cast<std::size_t>(b)];
    });
    std::vector<int> free(static_cast<std::size_t>(mesh_.num_shards),
                          mesh_.num_replicates * mesh_.tensor_parallel);
    for (const int owner : order) {
      int best = -1;
      double least = 0;
      for (int column = 0; column < mesh_.num_shards; ++column) {
        if (free[static_cast<std::size_t>(column)] == 0) continue;
        const double sum = change(owner, column, 1);
        if (best >= 0 && sum >= least) continue;
        best = column;
        least = sum;
      }
      --free[static_cast<std::size_t>(best)];
      column_of_[static_cast<std::size_t>(owner)] = best;
      put(owner, best, 1);
    }
  }

  // While it helps: two owners change columns.
  void swap_columns() {
    std::int64_t num_tries = 0;
    for (bool helped = true; helped && num_tries < kMaxSwapTries;) {
      helped = false;
      for (int a = 0; a < mesh_.num_owners() && num_tries < kMaxSwapTries; ++a) {
        for (int b = a + 1; b < mesh_.num_owners(); ++b) {
          const int column_a = column_of_[static_cast<std::size_t>(a)];
          const int column_b = column_of_[static_cast<std::size_t>(b)];
          ++num_tries;
          if (column_a == column_b || assignment_.signature(a) == assignment_.signature(b)) {
            continue;
          }
          num_tries += num_shapes();
          double sum = 0;
          for (int s = 0; s < num_shapes(); ++s) {
            const int more = assignment_.count(b, s) - assignment_.count(a, s);
            sum += table_.change(column_a, s, more) + table_.change(column_b, s, -more);
          }
          if (sum >= 0) continue;
          put(a, column_a, -1);
          put(b, column_b, -1);
          put(a, column_b, 1);
          put(b, column_a, 1);
          std::swap(column_of_[static_cast<std::size_t>(a)],
                    column_of_[static_cast<std::size_t>(b)]);
          helped = true;
        }
      }
    }
  }

  const Assignment& assignment_;
  Mesh mesh_;
  Table table_;
  std::vector<int> column_of_;  // [owners]
};

}  // namespace

Assignment columns_alike(const Assignment& assignment, Mesh mesh) {
  return Arrangement(assignment, mesh).arranged();
}

}  // namespace dmuon::plan
