#include "dmuon/balance/exchange.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <set>
#include <vector>

namespace dmuon::balance {
namespace {

// Numbers of matrices that change hands at once.
constexpr int kAmounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16};

// One owner swaps matrices of a shape for some of another owner's of another shape.
struct Exchange {
  Owner from;
  Owner to;
  ShapeIndex given;
  int num_given = 0;
  ShapeIndex taken = given;
  int num_taken = 0;
};

// True if the owner that gains bytes stays within max_bytes.
bool fits(const Assignment& assignment, const Exchange& exchange) {
  const Problem& problem = assignment.problem();
  const std::int64_t bytes = exchange.num_given * problem.bytes(exchange.given) -
                             exchange.num_taken * problem.bytes(exchange.taken);
  const Owner fuller = bytes > 0 ? exchange.to : exchange.from;
  return bytes == 0 || assignment.bytes(fuller) + std::abs(bytes) <= problem.instance().max_bytes;
}

void perform(Assignment& assignment, const Exchange& exchange) {
  assignment.add(exchange.from, exchange.given, -exchange.num_given);
  assignment.add(exchange.to, exchange.given, exchange.num_given);
  assignment.add(exchange.to, exchange.taken, -exchange.num_taken);
  assignment.add(exchange.from, exchange.taken, exchange.num_taken);
}

// Finds the best exchange of one owner.
class Search {
 public:
  Search(const Assignment& assignment, Owner from)
      : assignment_(assignment), from_(from), best_load_(assignment.load(from)) {}

  std::optional<Exchange> best() {
    std::set<std::vector<int>> seen;  // owners with equal counts are tried once
    for (const Owner to : assignment_.problem().owners()) {
      if (assignment_.load(to) >= assignment_.load(from_)) continue;
      if (seen.insert(assignment_.counts(to).values()).second) consider(to);
    }
    return best_;
  }

 private:
  void consider(Owner to) {
    for (const ShapeIndex s : assignment_.problem().shapes()) {
      for (const int amount : kAmounts) {
        if (amount > assignment_.count(from_, s)) break;
        give(to, s, amount);
      }
    }
  }

  void give(Owner to, ShapeIndex shape, int amount) {
    const Nanoseconds mine = assignment_.load_with(from_, shape, -amount);
    const Nanoseconds theirs = assignment_.load_with(to, shape, amount);
    keep({from_, to, shape, amount}, mine, theirs);
    // Taken matrices can only add to the giver's load, or nearly so.
    if (mine >= best_load_) return;
    for (const ShapeIndex t : assignment_.problem().shapes()) {
      if (t == shape) continue;
      for (const int taken : kAmounts) {
        if (taken > assignment_.count(to, t)) break;
        keep({from_, to, shape, amount, t, taken},
             mine + assignment_.load_with(from_, t, taken) - assignment_.load(from_),
             theirs + assignment_.load_with(to, t, -taken) - assignment_.load(to));
      }
    }
  }

  void keep(const Exchange& exchange, Nanoseconds mine, Nanoseconds theirs) {
    const Nanoseconds slower = std::max(mine, theirs);
    if (slower >= best_load_ || !fits(assignment_, exchange)) return;
    best_load_ = slower;
    best_ = exchange;
  }

  const Assignment& assignment_;
  Owner from_;
  Nanoseconds best_load_;
  std::optional<Exchange> best_;
};

}  // namespace

void exchange(Assignment& assignment, Nanoseconds target, int max_exchanges) {
  for (int i = 0; i < max_exchanges; ++i) {
    const Owner from = assignment.slowest();
    if (assignment.load(from) <= target) return;
    const std::optional<Exchange> best = Search(assignment, from).best();
    if (!best) return;
    perform(assignment, *best);
  }
}

}  // namespace dmuon::balance
