#include "dmuon/plan/spread.h"

#include <algorithm>
#include <map>
#include <ranges>
#include <set>

namespace dmuon::plan {
namespace {

// Counts a window's matrices and elements on the columns that it touches.
class Touched {
 public:
  explicit Touched(int num_columns) : counts_(num_columns), sizes_(num_columns) {}

  void add(Shard column, std::int64_t elements, int count) {
    if (counts_[column] > 0) by_size_.erase(by_size_.find(sizes_[column]));
    counts_[column] += count;
    sizes_[column] += count * elements;
    if (counts_[column] > 0) by_size_.insert(sizes_[column]);
    num_matrices_ += count;
    all_ += count * elements;
  }

  void add_to(Spread& sum) const {
    if (num_matrices_ == 0) return;
    const auto distinct = static_cast<double>(by_size_.size());
    sum.distinct_columns += distinct;
    sum.repeats += num_matrices_ - distinct;
    sum.busiest_column += static_cast<double>(*by_size_.rbegin()) *
                          static_cast<double>(counts_.size()) / static_cast<double>(all_);
  }

 private:
  core::PerShard<int> counts_;
  core::PerShard<std::int64_t> sizes_;  // elements
  std::multiset<std::int64_t> by_size_;
  int num_matrices_ = 0;
  std::int64_t all_ = 0;
};

// Uses maps, because a plan in a file may have a million columns, of which a unit touches few.
UnitSpread unit_spread(const std::vector<ParameterIndex>& unit, const Inventory& inventory,
                       Mesh mesh, const PerParameter<Owner>& owner, const PlanOptions& options) {
  std::map<Replicate, std::int64_t> nodes;
  std::map<Shard, std::int64_t> columns;
  UnitSpread found{.unit = inventory[unit.front()].unit};
  for (const ParameterIndex w : unit) {
    const std::int64_t bytes = inventory[w].num_elements() * options.weight_bytes;
    found.bytes += bytes;
    nodes[mesh.replicate_of(owner[w])] += bytes;
    if (!inventory[w].column) columns[mesh.shard_of(owner[w])] += bytes;
  }
  const bool all_have_some = nodes.size() == static_cast<std::size_t>(mesh.num_replicates);
  found.most_of_node = std::ranges::max(nodes | std::views::values);
  found.least_of_node = all_have_some ? std::ranges::min(nodes | std::views::values) : 0;
  if (!columns.empty()) found.most_of_column = std::ranges::max(columns | std::views::values);
  return found;
}

}  // namespace

Spread spread(const Inventory& inventory, Mesh mesh, const PerParameter<Owner>& owner,
              const PlanOptions& options) {
  Spread sum;
  sum.column_bytes.resize(mesh.num_shards);
  for (const ParameterIndex w : inventory.indices()) {
    sum.column_bytes[mesh.shard_of(owner[w])] += inventory[w].num_elements() * options.weight_bytes;
  }
  const auto units = group_by_unit(inventory);
  for (const auto& unit : units) {
    sum.units.push_back(unit_spread(unit, inventory, mesh, owner, options));
  }
  if (units.empty()) return sum;
  Touched touched(mesh.num_shards);
  const auto add_unit = [&](int unit, int count) {
    for (const ParameterIndex w : units[UnitIndex(unit)]) {
      if (inventory[w].column) continue;
      touched.add(mesh.shard_of(owner[w]), inventory[w].num_elements(), count);
    }
  };
  const int length = std::min(std::max(1, options.lookahead), units.size());
  for (int last = 0; last < units.size(); ++last) {
    add_unit(last, 1);
    if (last + 1 < length) continue;
    touched.add_to(sum);
    add_unit(last + 1 - length, -1);
  }
  for (double* mean : {&sum.distinct_columns, &sum.repeats, &sum.busiest_column}) {
    *mean /= units.size() - length + 1;
  }
  return sum;
}

}  // namespace dmuon::plan
