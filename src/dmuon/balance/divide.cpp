#include <algorithm>
#include <cstddef>
#include <limits>
#include <unordered_set>
#include <vector>

#include "dmuon/balance/local_search.h"
#include "dmuon/balance/patterns.h"

namespace dmuon::balance {
namespace {

constexpr int kCells = 1024;
constexpr int kMaxShared = 2000;         // matrices of one shape that two owners may have together
constexpr std::size_t kMaxChecked = 24;  // divisions whose true loads are looked at
constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max() / 4;

// Divisions of what owners `a` and `b` have together. other_[q]: the least that `b` takes if `a`
// takes q cells, rounded down.
class Division {
 public:
  Division(const Assignment& assignment, int a, int b, int cells)
      : assignment_(assignment), a_(a), b_(b) {
    const Nanoseconds slower = std::max(assignment.load(a), assignment.load(b));
    cell_ = std::max<Nanoseconds>(1, slower / cells);
    other_.assign(static_cast<std::size_t>(slower / cell_) + 1, kNever);
    other_[0] = 0;
    for (int s = 0; s < problem().num_shapes(); ++s) add(s);
  }

  /// The division with the smallest larger load below `limit`, as the pattern of `a`; empty if
  /// there is none.
  Pattern best_below(Nanoseconds limit) const {
    std::vector<std::pair<Nanoseconds, std::size_t>> order;
    for (std::size_t q = 0; q < other_.size(); ++q) {
      const Nanoseconds larger = std::max(static_cast<Nanoseconds>(q) * cell_, other_[q]);
      if (larger < limit) order.emplace_back(larger, q);
    }
    std::sort(order.begin(), order.end());
    Pattern best;
    for (std::size_t i = 0; i < std::min(order.size(), kMaxChecked); ++i) {
      if (order[i].first >= limit) break;
      Pattern pattern = traced(order[i].second);
      const Nanoseconds larger = larger_load(pattern);
      if (larger >= limit || !fits(pattern)) continue;
      limit = larger;
      best = std::move(pattern);
    }
    return best;
  }

 private:
  const Problem& problem() const { return assignment_.problem(); }
  int together(int shape) const {
    return assignment_.count(a_, shape) + assignment_.count(b_, shape);
  }

  void add(int shape) {
    const OwnerTime& time = problem().time(shape);
    std::vector<Nanoseconds> next(other_.size(), kNever);
    std::vector<std::int16_t> chosen(other_.size(), 0);
    for (int k = 0; k <= together(shape); ++k) {
      const auto takes = static_cast<std::size_t>(time(k) / cell_);
      const Nanoseconds rest = time(together(shape) - k);
      for (std::size_t q = takes; q < other_.size(); ++q) {
        const Nanoseconds ns = other_[q - takes] + rest;
        if (ns >= next[q]) continue;
        next[q] = ns;
        chosen[q] = static_cast<std::int16_t>(k);
      }
    }
    other_.swap(next);
    chosen_.push_back(std::move(chosen));
  }

  Pattern traced(std::size_t q) const {
    Pattern pattern(chosen_.size());
    for (std::size_t s = chosen_.size(); s-- > 0;) {
      pattern[s] = chosen_[s][q];
      q -= static_cast<std::size_t>(problem().time(static_cast<int>(s))(pattern[s]) / cell_);
    }
    return pattern;
  }

  Nanoseconds larger_load(const Pattern& pattern) const {
    Pattern rest(pattern.size());
    for (std::size_t s = 0; s < pattern.size(); ++s) {
      rest[s] = together(static_cast<int>(s)) - pattern[s];
    }
    return std::max(load(problem(), pattern), load(problem(), rest));
  }

  bool fits(const Pattern& pattern) const {
    std::int64_t bytes = 0;
    for (std::size_t s = 0; s < pattern.size(); ++s) {
      bytes += pattern[s] * problem().bytes(static_cast<int>(s));
    }
    const std::int64_t cap = problem().instance().max_bytes;
    return bytes <= cap && assignment_.bytes(a_) + assignment_.bytes(b_) - bytes <= cap;
  }

  const Assignment& assignment_;
  int a_;
  int b_;
  Nanoseconds cell_ = 1;
  std::vector<Nanoseconds> other_;
  std::vector<std::vector<std::int16_t>> chosen_;  // [shapes][cells] matrices that `a` gets
};

}  // namespace

bool divide_pair(Assignment& assignment, int a, int b, int cells) {
  const Problem& problem = assignment.problem();
  for (int s = 0; s < problem.num_shapes(); ++s) {
    if (assignment.count(a, s) + assignment.count(b, s) > kMaxShared) return false;
  }
  const Nanoseconds slower = std::max(assignment.load(a), assignment.load(b));
  const Pattern pattern = Division(assignment, a, b, cells).best_below(slower);
  if (pattern.empty()) return false;
  for (int s = 0; s < problem.num_shapes(); ++s) {
    const int change = pattern[static_cast<std::size_t>(s)] - assignment.count(a, s);
    assignment.add(a, s, change);
    assignment.add(b, s, -change);
  }
  return true;
}

int divide_pairs(Assignment& assignment, Nanoseconds target, int max_rounds, int max_pairs) {
  int num_pairs = 0;
  for (int round = 0; round < max_rounds; ++round) {
    const int slowest = assignment.slowest();
    if (assignment.load(slowest) <= target) return num_pairs;
    std::vector<int> others;
    for (int owner = 0; owner < assignment.problem().num_owners(); ++owner) {
      if (assignment.load(owner) < assignment.load(slowest)) others.push_back(owner);
    }
    std::stable_sort(others.begin(), others.end(),
                     [&](int x, int y) { return assignment.load(x) < assignment.load(y); });
    std::unordered_set<std::uint64_t> seen;
    bool helped = false;
    for (const int other : others) {
      if (!seen.insert(assignment.signature(other)).second) continue;
      if (num_pairs++ >= max_pairs) return num_pairs;
      helped = divide_pair(assignment, slowest, other, kCells);
      if (helped) break;
    }
    if (!helped) return num_pairs;
  }
  return num_pairs;
}

}  // namespace dmuon::balance
