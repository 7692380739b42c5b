#include "dmuon/plan/window.h"

#include <algorithm>
#include <set>

namespace dmuon::plan {
namespace {

// What a window has on the columns that it touches.
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

}  // namespace

Windows::Windows(const Inventory& inventory, int num_columns, int window)
    : unit_of_(inventory.size()) {
  const auto units = group_by_unit(inventory);
  for (const UnitIndex unit : units.indices()) {
    for (const ParameterIndex matrix : units[unit]) unit_of_[matrix] = unit;
  }
  counts_.resize(units.size(), core::PerShard<int>(num_columns));
  window_ = std::min(window, std::max(1, units.size()));
}

void Windows::add(ParameterIndex matrix, Shard column, int count) {
  counts_[unit_of_[matrix]][column] += count;
}

int Windows::count(int unit, Shard column) const {
  return counts_.contains(UnitIndex(unit)) ? counts_[UnitIndex(unit)][column] : 0;
}

int Windows::window_count(int unit, Shard column) const {
  int sum = 0;
  for (int u = unit; u < unit + window_; ++u) sum += count(u, column);
  return sum;
}

template <typename Visit>
void Windows::visit_windows(ParameterIndex matrix, Shard column, const Visit& visit) const {
  const int unit = unit_of_[matrix].value();
  int first = unit - window_ + 1;
  int in_window = window_count(first, column);
  visit(in_window);
  for (; first < unit; ++first) {
    in_window += count(first + window_, column) - count(first, column);
    visit(in_window);
  }
}

int Windows::in_window(ParameterIndex matrix, Shard column) const {
  return window_count(unit_of_[matrix].value() - window_ + 1, column);
}

bool Windows::repeats(ParameterIndex matrix, Shard column) const {
  bool any = in_unit(matrix, column) > 1;
  visit_windows(matrix, column, [&](int count) { any |= count > 1; });
  return any;
}

// A unit counts as much as all windows that hold it.
std::int64_t Windows::change_of_add(ParameterIndex matrix, Shard column, int count) {
  const auto of_square = [&](int before) {
    return std::int64_t{count} * (2 * std::int64_t{before} + count);
  };
  std::int64_t sum = std::int64_t{window_} * of_square(in_unit(matrix, column));
  visit_windows(matrix, column, [&](int before) { sum += of_square(before); });
  add(matrix, column, count);
  return sum;
}

std::int64_t Windows::change_of_swap(ParameterIndex a, Shard column_a, ParameterIndex b,
                                     Shard column_b) {
  std::int64_t sum = change_of_add(a, column_a, -1);
  sum += change_of_add(a, column_b, 1);
  sum += change_of_add(b, column_b, -1);
  sum += change_of_add(b, column_a, 1);
  swap(b, column_a, a, column_b);
  return sum;
}

void Windows::swap(ParameterIndex a, Shard column_a, ParameterIndex b, Shard column_b) {
  add(a, column_a, -1);
  add(a, column_b, 1);
  add(b, column_b, -1);
  add(b, column_a, 1);
}

Spread spread(const Inventory& inventory, Mesh mesh, const PerParameter<Owner>& owner,
              const Options& options) {
  Spread sum;
  sum.column_bytes.resize(mesh.num_shards);
  for (const ParameterIndex w : inventory.indices()) {
    sum.column_bytes[mesh.shard_of(owner[w])] += inventory[w].num_elements() * options.weight_bytes;
  }
  const auto units = group_by_unit(inventory);
  if (units.empty()) return sum;
  Touched touched(mesh.num_shards);
  const auto add_unit = [&](int unit, int count) {
    for (const ParameterIndex w : units[UnitIndex(unit)]) {
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
