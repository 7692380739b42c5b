#include "dmuon/balance/patterns.h"

#include <algorithm>
#include <vector>

namespace dmuon::balance {
namespace {

// The most ways to fill an owner with one shape. If there are more, neighbours are merged, at the
// smallest size and the largest value of each lot.
constexpr std::size_t kMaxChoices = 512;

struct Choice {
  std::size_t cells;
  std::int64_t value;
  int num_matrices;
};

using ChoiceIndex = core::Index<struct ChoiceKind>;
using Choices = core::Vector<ChoiceIndex, Choice>;

// Returns the numbers of matrices of one shape worth considering: each takes more cells and is
// worth more than the one before.
Choices choices(const OwnerTime& time, std::int64_t per_matrix, std::int64_t per_ns,
                Nanoseconds limit, Nanoseconds cell, int available) {
  std::vector<Choice> by_cells(static_cast<std::size_t>(limit / cell) + 1, {0, 0, 0});
  for (int k = 1; k <= available && time.at_least(k) <= limit; ++k) {
    if (time(k) > limit) continue;
    const std::int64_t value = per_matrix * k + per_ns * time(k);
    const auto cells = static_cast<std::size_t>(time(k) / cell);
    if (value > by_cells[cells].value) by_cells[cells] = {cells, value, k};
  }
  std::vector<Choice> kept;
  std::int64_t most = 0;
  for (const Choice& choice : by_cells) {
    if (choice.value <= most) continue;
    most = choice.value;
    kept.push_back(choice);
  }
  const std::size_t lot = (kept.size() + kMaxChoices - 1) / kMaxChoices;
  Choices lots;
  for (std::size_t first = 0; first < kept.size(); first += lot) {
    const Choice& last = kept[std::min(first + lot, kept.size()) - 1];
    lots.push_back({kept[first].cells, last.value, last.num_matrices});
  }
  return lots;
}

}  // namespace

Nanoseconds load(const Problem& problem, const Pattern& pattern) {
  Nanoseconds sum = 0;
  for (const ShapeIndex s : problem.shapes()) sum += problem.time(s)(pattern[s]);
  return sum;
}

// best[q]: the largest value of a pattern of at most q cells, shape after shape.
PricedPattern most_valuable(const Problem& problem, const Prices& prices, Nanoseconds limit,
                            int cells, const PerShape<int>& available) {
  const Nanoseconds cell = std::max<Nanoseconds>(1, limit / cells);
  const auto capacity = static_cast<std::size_t>(limit / cell);
  std::vector<std::int64_t> best(capacity + 1, 0);
  std::vector<std::int64_t> next;
  PerShape<Choices> choices_of(available.size());
  PerShape<std::vector<std::int16_t>> chosen(available.size());  // [cells] -1: none
  for (const ShapeIndex s : problem.shapes()) {
    if (prices.per_matrix[s] <= 0 && prices.per_ns[s] <= 0) continue;
    choices_of[s] =
        choices(problem.time(s), prices.per_matrix[s], prices.per_ns[s], limit, cell, available[s]);
    chosen[s].assign(capacity + 1, -1);
    next = best;
    for (std::int16_t c = 0; const auto& [takes, value, num_matrices] : choices_of[s]) {
      for (std::size_t q = takes; q <= capacity; ++q) {
        if (best[q - takes] + value <= next[q]) continue;
        next[q] = best[q - takes] + value;
        chosen[s][q] = c;
      }
      ++c;
    }
    best.swap(next);
  }
  PricedPattern found{Pattern(available.size()), best[capacity]};
  std::size_t left = capacity;
  for (ShapeIndex s(available.size() - 1); s >= ShapeIndex(0); --s) {
    if (chosen[s].empty() || chosen[s][left] < 0) continue;
    const Choice& choice = choices_of[s][ChoiceIndex(chosen[s][left])];
    found.pattern[s] = choice.num_matrices;
    left -= choice.cells;
  }
  return found;
}

}  // namespace dmuon::balance
