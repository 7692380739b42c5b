#include "dmuon/plan/balance.h"

#include <algorithm>

#include "dmuon/plan/layout.h"

namespace dmuon::plan {
namespace {

// Differences below this share of a load are rounding, not better or worse.
constexpr double kTolerance = 1e-9;
// About 50 ms of tries. A limit on time would make the answer depend on the machine.
constexpr int kMaxTries = 2'000'000;

struct Piece {
  int shape;
  int num_matrices;
  double seconds;
};

std::vector<Piece> cut(const ShapeGroups& groups, const CostTable& costs,
                       const std::vector<int>& piece_sizes) {
  std::vector<Piece> pieces;
  for (int s = 0; s < static_cast<int>(groups.shapes.size()); ++s) {
    for (int left = groups.num_matrices[s]; left > 0; left -= piece_sizes[s]) {
      const int taken = std::min(piece_sizes[s], left);
      pieces.push_back({s, taken, costs[s].best_seconds(taken)});
    }
  }
  // Stable: equal costs stay in execution order of their shapes.
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.seconds > b.seconds; });
  return pieces;
}

}  // namespace

// Two bounds, whatever the costs look like.
//   One matrix: the slot that owns a matrix of shape s runs it in some batch, which takes at least
//   the
// cheapest batch of s.
//   All matrices: the batches of shape s on all slots together split its n_s matrices into batches,
//   and
// best_seconds(n_s) is the minimum over all such splits. So all slots together take at least the
// sum over s of best_seconds(n_s), and the slowest takes at least the mean. The latter is lowered
// by more than its rounding error, so that the bound stays true in floating point.
double lower_bound_seconds(const ShapeGroups& groups, const CostTable& costs, int num_slots) {
  double one = 0;
  double all = 0;
  for (std::size_t s = 0; s < groups.shapes.size(); ++s) {
    if (groups.num_matrices[s] == 0) continue;
    one = std::max(one, costs[s].cheapest_batch());
    all += costs[s].best_seconds(groups.num_matrices[s]);
  }
  return std::max(one, all / num_slots * (1 - kTolerance));
}

std::vector<int> piece_sizes(const ShapeGroups& groups, const CostTable& costs, double seconds) {
  std::vector<int> sizes;
  for (std::size_t s = 0; s < groups.shapes.size(); ++s) {
    int size = 1;
    while (size < groups.num_matrices[s] && costs[s].best_seconds(size + 1) <= seconds) ++size;
    sizes.push_back(size);
  }
  return sizes;
}

Balance::Balance(const CostTable& costs, Mesh mesh)
    : costs_(&costs),
      counts_(static_cast<int>(costs.size()), mesh.num_slots()),
      loads_(mesh.num_slots(), 0.0),
      shapes_(mesh.num_slots()) {
  for (int w = 0; w < mesh.num_slots(); ++w) {
    layout_order_.push_back(slot_index(layout_slot(w, mesh), mesh));
  }
}

double Balance::change(int shape, int slot, int added) const {
  const int k = counts_.at(shape, slot);
  return seconds(shape, k + added) - seconds(shape, k);
}

void Balance::add(int shape, int slot, int added) {
  loads_[slot] += change(shape, slot, added);
  counts_.at(shape, slot) += added;
}

void Balance::deal(const ShapeGroups& groups, const std::vector<int>& piece_sizes) {
  const std::size_t num_slots = loads_.size();
  std::size_t place = 0;
  for (const Piece& piece : cut(groups, *costs_, piece_sizes)) {
    int chosen = -1;
    double chosen_load = 0;
    for (std::size_t i = 0; i < num_slots; ++i) {
      const std::size_t position = place + i < num_slots ? place + i : place + i - num_slots;
      const int slot = layout_order_[position];
      const double load = loads_[slot] + change(piece.shape, slot, piece.num_matrices);
      if (chosen < 0 || load < chosen_load * (1 - kTolerance)) {
        chosen = slot;
        chosen_load = load;
      }
    }
    add(piece.shape, chosen, piece.num_matrices);
    if (++place == num_slots) place = 0;
  }
}

// Keeps `exchange` in `best` if it leaves the slower of its two slots faster than `best_seconds`.
void Balance::consider(int from, const Exchange& exchange, Exchange& best,
                       double& best_seconds) const {
  double mine = loads_[from] + change(exchange.given, from, -exchange.num_given);
  double theirs = loads_[exchange.to] + change(exchange.given, exchange.to, exchange.num_given);
  if (exchange.taken >= 0) {
    mine += change(exchange.taken, from, 1);
    theirs += change(exchange.taken, exchange.to, -1);
  }
  const double slower = std::max(mine, theirs);
  if (slower < best_seconds * (1 - kTolerance)) {
    best = exchange;
    best_seconds = slower;
  }
}

Balance::Exchange Balance::best_exchange(int from, int& num_tries) const {
  Exchange best;
  double best_seconds = loads_[from];
  for (int to = 0; to < static_cast<int>(loads_.size()) && num_tries < kMaxTries; ++to) {
    if (to == from) continue;
    for (const int given : shapes_[from]) {
      const int all = counts_.at(given, from);
      consider(from, {to, given, 1, -1}, best, best_seconds);
      if (all > 1) consider(from, {to, given, all, -1}, best, best_seconds);
      for (const int taken : shapes_[to]) {
        if (taken != given) consider(from, {to, given, 1, taken}, best, best_seconds);
      }
      num_tries += 2 + static_cast<int>(shapes_[to].size());
    }
  }
  return best;
}

void Balance::refresh(int slot) {
  shapes_[slot].clear();
  loads_[slot] = 0;
  for (int s = 0; s < static_cast<int>(costs_->size()); ++s) {
    if (counts_.at(s, slot) == 0) continue;
    shapes_[slot].push_back(s);
    loads_[slot] += seconds(s, counts_.at(s, slot));
  }
}

// Ends: every exchange lowers the larger of two loads of which one was the largest of all, so the
// sorted loads fall lexicographically.
void Balance::improve() {
  for (int slot = 0; slot < static_cast<int>(loads_.size()); ++slot) refresh(slot);
  int num_tries = 0;
  while (num_tries < kMaxTries) {
    const auto slowest = std::max_element(loads_.begin(), loads_.end());
    const auto from = static_cast<int>(slowest - loads_.begin());
    const Exchange best = best_exchange(from, num_tries);
    if (best.to < 0) return;
    counts_.at(best.given, from) -= best.num_given;
    counts_.at(best.given, best.to) += best.num_given;
    if (best.taken >= 0) {
      ++counts_.at(best.taken, from);
      --counts_.at(best.taken, best.to);
    }
    refresh(from);
    refresh(best.to);
  }
}

double Balance::makespan_seconds() const { return *std::max_element(loads_.begin(), loads_.end()); }

}  // namespace dmuon::plan
