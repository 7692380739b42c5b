#include "dmuon/balance/patterns.h"

#include <algorithm>

namespace dmuon::balance {
namespace {

// More ways to fill an owner with one shape are put together, at the smallest size and the largest
// value of each lot.
constexpr std::size_t kMaxChoices = 512;

struct Choice {
  int cells;
  std::int64_t value;
  int num_matrices;
};

// The numbers of matrices of one shape worth considering: each takes more cells and is worth more
// than the one before.
std::vector<Choice> choices(const OwnerTime& time, std::int64_t per_matrix, std::int64_t per_ns,
                            Nanoseconds limit, Nanoseconds cell, int available) {
  std::vector<Choice> by_cells(static_cast<std::size_t>(limit / cell) + 1, {0, 0, 0});
  for (int k = 1; k <= available && time.at_least(k) <= limit; ++k) {
    if (time(k) > limit) continue;
    const std::int64_t value = per_matrix * k + per_ns * time(k);
    const auto cells = static_cast<std::size_t>(time(k) / cell);
    if (value > by_cells[cells].value) by_cells[cells] = {static_cast<int>(cells), value, k};
  }
  std::vector<Choice> kept;
  std::int64_t most = 0;
  for (const Choice& choice : by_cells) {
    if (choice.value <= most) continue;
    most = choice.value;
    kept.push_back(choice);
  }
  if (kept.size() <= kMaxChoices) return kept;
  const std::size_t lot = (kept.size() + kMaxChoices - 1) / kMaxChoices;
  std::vector<Choice> lots;
  for (std::size_t first = 0; first < kept.size(); first += lot) {
    const Choice& last = kept[std::min(first + lot, kept.size()) - 1];
    lots.push_back({kept[first].cells, last.value, last.num_matrices});
  }
  return lots;
}

}  // namespace

Nanoseconds load(const Problem& problem, const Pattern& pattern) {
  Nanoseconds sum = 0;
  for (int s = 0; s < problem.num_shapes(); ++s) {
    sum += problem.time(s)(pattern[static_cast<std::size_t>(s)]);
  }
  return sum;
}

// best[q]: the largest value of a pattern of at most q cells, shape after shape.
PricedPattern most_valuable(const Problem& problem, const Prices& prices, Nanoseconds limit,
                            int cells, const std::vector<int>& available) {
  const Nanoseconds cell = std::max<Nanoseconds>(1, limit / cells);
  const auto capacity = static_cast<std::size_t>(limit / cell);
  const auto num_shapes = static_cast<std::size_t>(problem.num_shapes());
  std::vector<std::int64_t> best(capacity + 1, 0);
  std::vector<std::int64_t> next;
  std::vector<std::vector<Choice>> choices_of(num_shapes);
  std::vector<std::vector<std::int16_t>> chosen(num_shapes);  // [shapes][cells], -1: none
  for (std::size_t s = 0; s < num_shapes; ++s) {
    if (prices.per_matrix[s] <= 0 && prices.per_ns[s] <= 0) continue;
    choices_of[s] = choices(problem.time(static_cast<int>(s)), prices.per_matrix[s],
                            prices.per_ns[s], limit, cell, available[s]);
    chosen[s].assign(capacity + 1, -1);
    next = best;
    for (std::size_t c = 0; c < choices_of[s].size(); ++c) {
      const auto takes = static_cast<std::size_t>(choices_of[s][c].cells);
      const std::int64_t value = choices_of[s][c].value;
      for (std::size_t q = takes; q <= capacity; ++q) {
        if (best[q - takes] + value <= next[q]) continue;
        next[q] = best[q - takes] + value;
        chosen[s][q] = static_cast<std::int16_t>(c);
      }
    }
    best.swap(next);
  }
  PricedPattern found{Pattern(num_shapes, 0), best[capacity]};
  std::size_t q = capacity;
  for (std::size_t s = num_shapes; s-- > 0;) {
    if (chosen[s].empty() || chosen[s][q] < 0) continue;
    const Choice& choice = choices_of[s][static_cast<std::size_t>(chosen[s][q])];
    found.pattern[s] = choice.num_matrices;
    q -= static_cast<std::size_t>(choice.cells);
  }
  return found;
}

}  // namespace dmuon::balance
