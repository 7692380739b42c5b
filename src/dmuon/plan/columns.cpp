#include "dmuon/plan/columns.h"

#include <utility>
#include <vector>

namespace dmuon::plan {
namespace {

using balance::Assignment;
using balance::Nanoseconds;
using core::ShapeIndex;

// Columns are alike where the sum of the squares of what they hold is small.
class Arrangement {
 public:
  Arrangement(const Assignment& assignment, Mesh mesh)
      : assignment_(assignment),
        mesh_(mesh),
        column_of_(mesh.num_owners()),
        held_(mesh.num_shards,
              core::PerShape<std::int64_t>(assignment.problem().num_matrices().size())) {
    give_columns();
  }

  /// Column after column, the owner with most to do goes to the node that has least so far.
  Assignment arranged() const {
    Assignment result(assignment_.problem());
    core::Vector<Replicate, Nanoseconds> node_loads(mesh_.num_replicates);
    core::PerShard<int> num_placed(mesh_.num_shards);
    std::vector<Replicate> nodes;
    for (const Owner owner : core::sorted_by(mesh_.owners(), [&](Owner one) {
           return std::pair(column_of_[one], -assignment_.load(one));
         })) {
      const Shard column = column_of_[owner];
      const int place = num_placed[column]++;
      if (place == 0) {
        nodes =
            core::sorted_by(mesh_.replicates(), [&](Replicate node) { return node_loads[node]; });
      }
      const Replicate node = nodes.begin()[place % mesh_.num_replicates];
      node_loads[node] += assignment_.load(owner);
      const Owner renumbered = mesh_.owner_at(node, column, place / mesh_.num_replicates);
      for (const ShapeIndex s : shapes()) result.add(renumbered, s, assignment_.count(owner, s));
    }
    return result;
  }

 private:
  core::Indices<ShapeIndex> shapes() const { return assignment_.problem().shapes(); }

  // Owners with most matrices first, each to the column where it adds least to the squares.
  void give_columns() {
    core::PerShard<int> free(mesh_.num_shards, mesh_.num_replicates * mesh_.tensor_parallel);
    for (const Owner owner : core::sorted_by(mesh_.owners(), [&](Owner one) {
           std::int64_t all = 0;
           for (const int count : assignment_.counts(one)) all += count;
           return -all;
         })) {
      const auto added = [&](Shard column) {
        std::int64_t sum = 0;
        for (const ShapeIndex s : shapes()) sum += assignment_.count(owner, s) * held_[column][s];
        return sum;
      };
      const auto key = [&](Shard column) { return std::pair(free[column] == 0, added(column)); };
      Shard best;
      for (const Shard column : mesh_.shards()) {
        if (key(column) < key(best)) best = column;
      }
      --free[best];
      column_of_[owner] = best;
      for (const ShapeIndex s : shapes()) held_[best][s] += assignment_.count(owner, s);
    }
  }

  const Assignment& assignment_;
  Mesh mesh_;
  core::PerOwner<Shard> column_of_;
  core::PerShard<core::PerShape<std::int64_t>> held_;  // matrices
};

}  // namespace

Assignment columns_alike(const Assignment& assignment, Mesh mesh) {
  return Arrangement(assignment, mesh).arranged();
}

}  // namespace dmuon::plan
