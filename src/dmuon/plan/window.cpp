#include "dmuon/plan/window.h"

#include <algorithm>
#include <map>
#include <set>

namespace dmuon::plan {

namespace {

// [matrices] each one's unit, by the order of first matrices.
std::vector<int> places_of_units(const Inventory& inventory) {
  std::map<int, int> place_of;
  std::vector<int> places;
  for (const Parameter& matrix : inventory) {
    places.push_back(
        place_of.try_emplace(matrix.unit, static_cast<int>(place_of.size())).first->second);
  }
  return places;
}

int count_of(const std::vector<int>& places) {
  return places.empty() ? 0 : *std::max_element(places.begin(), places.end()) + 1;
}

// What a window has on the columns that it touches.
class Touched {
 public:
  explicit Touched(int num_columns)
      : counts_(static_cast<std::size_t>(num_columns)), sizes_(counts_.size()) {}

  void add(int column, std::int64_t elements, int count) {
    const auto c = static_cast<std::size_t>(column);
    if (counts_[c] > 0) by_size_.erase(by_size_.find(sizes_[c]));
    counts_[c] += count;
    sizes_[c] += count * elements;
    if (counts_[c] > 0) by_size_.insert(sizes_[c]);
    num_matrices_ += count;
    all_ += count * elements;
  }

  double distinct() const { return static_cast<double>(by_size_.size()); }
  double repeats() const { return static_cast<double>(num_matrices_) - distinct(); }
  /// @return the largest size, over the mean of all columns.
  double busiest() const {
    return static_cast<double>(*by_size_.rbegin()) * static_cast<double>(counts_.size()) /
           static_cast<double>(all_);
  }

 private:
  std::vector<int> counts_;          // [columns]
  std::vector<std::int64_t> sizes_;  // [columns] elements
  std::multiset<std::int64_t> by_size_;
  std::int64_t num_matrices_ = 0;
  std::int64_t all_ = 0;
};

}  // namespace

Windows::Windows(const Inventory& inventory, int num_columns, int window)
    : place_(places_of_units(inventory)),
      num_units_(count_of(place_)),
      window_(std::min(window, std::max(1, num_units_))),
      counts_(num_units_, num_columns) {}

void Windows::add(std::size_t matrix, int column, int count) {
  counts_(place_[matrix], column) += count;
}

int Windows::window_count(int unit, int column) const {
  int sum = 0;
  for (int u = std::max(unit, 0); u < std::min(unit + window_, num_units_); ++u) {
    sum += counts_(u, column);
  }
  return sum;
}

template <typename Visit>
void Windows::visit_windows(int unit, int column, const Visit& visit) const {
  int first = unit - window_ + 1;
  int count = window_count(first, column);
  visit(count);
  for (; first < unit; ++first) {
    if (first >= 0) count -= counts_(first, column);
    if (first + window_ < num_units_) count += counts_(first + window_, column);
    visit(count);
  }
}

int Windows::in_window(std::size_t matrix, int column) const {
  return window_count(place_[matrix] - window_ + 1, column);
}

bool Windows::repeats(std::size_t matrix, int column) const {
  bool any = in_unit(matrix, column) > 1;
  visit_windows(place_[matrix], column, [&](int count) { any |= count > 1; });
  return any;
}

// A unit counts as much as all windows that hold it.
std::int64_t Windows::change(int unit, int column, int count) const {
  const auto of_square = [&](int before) {
    return std::int64_t{count} * (2 * std::int64_t{before} + count);
  };
  std::int64_t sum = std::int64_t{window_} * of_square(counts_(unit, column));
  visit_windows(unit, column, [&](int before) { sum += of_square(before); });
  return sum;
}

std::int64_t Windows::change_of_swap(std::size_t a, int column_a, std::size_t b, int column_b) {
  std::int64_t sum = 0;
  const auto perform = [&](std::size_t matrix, int column, int count) {
    sum += change(place_[matrix], column, count);
    add(matrix, column, count);
  };
  perform(a, column_a, -1);
  perform(a, column_b, 1);
  perform(b, column_b, -1);
  perform(b, column_a, 1);
  swap(b, column_a, a, column_b);
  return sum;
}

void Windows::swap(std::size_t a, int column_a, std::size_t b, int column_b) {
  add(a, column_a, -1);
  add(a, column_b, 1);
  add(b, column_b, -1);
  add(b, column_a, 1);
}

WindowFigures window_figures(const Inventory& inventory, int num_columns,
                             const std::vector<int>& columns, int window) {
  const std::vector<int> places = places_of_units(inventory);
  std::vector<std::vector<std::size_t>> units(static_cast<std::size_t>(count_of(places)));
  for (std::size_t w = 0; w < places.size(); ++w) {
    units[static_cast<std::size_t>(places[w])].push_back(w);
  }
  if (units.empty()) return {};
  Touched touched(num_columns);
  const auto add_unit = [&](std::size_t unit, int count) {
    for (const std::size_t w : units[unit]) {
      touched.add(columns[w], inventory[w].num_elements(), count);
    }
  };
  const std::size_t length = std::min(static_cast<std::size_t>(window), units.size());
  WindowFigures sum;
  for (std::size_t last = 0; last < units.size(); ++last) {
    add_unit(last, 1);
    if (last + 1 < length) continue;
    sum.distinct += touched.distinct();
    sum.repeats += touched.repeats();
    sum.busiest += touched.busiest();
    add_unit(last + 1 - length, -1);
  }
  const auto num_windows = static_cast<double>(units.size() - length + 1);
  return {sum.distinct / num_windows, sum.repeats / num_windows, sum.busiest / num_windows};
}

}  // namespace dmuon::plan
