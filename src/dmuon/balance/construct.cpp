#include "dmuon/balance/construct.h"

#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

namespace dmuon::balance {
namespace {

struct Lot {
  Nanoseconds ns;
  int shape;
  int size;
};

// Owners in the order of a key, the smallest first, ties by owner. `take` returns the first owner
// that accepts; the key of an owner is renewed with `put`.
template <typename Key>
class Queue {
 public:
  explicit Queue(int num_owners) {
    for (int owner = 0; owner < num_owners; ++owner) put(Key{}, owner);
  }

  void put(Key key, int owner) { queue_.emplace(key, owner); }

  /// @return -1 if none accepts.
  template <typename Accepts>
  int take(const Accepts& accepts) {
    std::vector<std::pair<Key, int>> refused;
    int found = -1;
    while (found < 0 && !queue_.empty()) {
      const auto first = queue_.top();
      queue_.pop();
      if (accepts(first.second)) {
        found = first.second;
      } else {
        refused.push_back(first);
      }
    }
    for (const auto& entry : refused) queue_.push(entry);
    return found;
  }

 private:
  using Entry = std::pair<Key, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
};

// Shapes by a falling key, ties by index.
template <typename Key>
std::vector<int> shapes_by(const Problem& problem, const Key& key) {
  std::vector<int> shapes;
  for (int s = 0; s < problem.num_shapes(); ++s) shapes.push_back(s);
  std::stable_sort(shapes.begin(), shapes.end(), [&](int a, int b) { return key(a) > key(b); });
  return shapes;
}

std::vector<int> shapes_by_time(const Problem& problem) {
  return shapes_by(problem, [&](int s) {
    return problem.num_matrices(s) > 0 ? problem.time(s)(1) : Nanoseconds{0};
  });
}

// All owners have `each` matrices of every shape at first; the rest goes where it is cheapest.
std::optional<Assignment> rest_where_cheapest(const Problem& problem, bool evenly) {
  Assignment assignment(problem);
  for (const int s : shapes_by_time(problem)) {
    const int each = evenly ? problem.num_matrices(s) / problem.num_owners() : 0;
    for (int owner = 0; owner < problem.num_owners(); ++owner) {
      if (!assignment.fits(owner, s, each)) return std::nullopt;
      assignment.add(owner, s, each);
    }
    for (int left = problem.num_matrices(s) - each * problem.num_owners(); left > 0; --left) {
      const int owner = cheapest_owner(assignment, s);
      if (owner < 0) return std::nullopt;
      assignment.add(owner, s, 1);
    }
  }
  return assignment;
}

}  // namespace

int cheapest_owner(const Assignment& assignment, int shape) {
  int best = -1;
  Nanoseconds least = 0;
  for (int owner = 0; owner < assignment.problem().num_owners(); ++owner) {
    if (!assignment.fits(owner, shape, 1)) continue;
    const Nanoseconds load = assignment.load_with(owner, shape, 1);
    if (best >= 0 && load >= least) continue;
    best = owner;
    least = load;
  }
  return best;
}

std::optional<Assignment> longest_first(const Problem& problem, int lot) {
  std::vector<Lot> lots;
  for (int s = 0; s < problem.num_shapes(); ++s) {
    for (int left = problem.num_matrices(s); left > 0;) {
      const int size = std::min(lot, left);
      lots.push_back({problem.time(s)(size), s, size});
      left -= size;
    }
  }
  std::stable_sort(lots.begin(), lots.end(),
                   [](const Lot& a, const Lot& b) { return a.ns > b.ns; });
  Assignment assignment(problem);
  Queue<Nanoseconds> queue(problem.num_owners());
  for (const Lot& next : lots) {
    const int owner = queue.take(
        [&](int candidate) { return assignment.fits(candidate, next.shape, next.size); });
    if (owner < 0) return std::nullopt;
    assignment.add(owner, next.shape, next.size);
    queue.put(assignment.load(owner), owner);
  }
  return assignment;
}

std::optional<Assignment> least_loaded(const Problem& problem) {
  return rest_where_cheapest(problem, false);
}

std::optional<Assignment> even(const Problem& problem) {
  return rest_where_cheapest(problem, true);
}

std::optional<Assignment> fewest_bytes(const Problem& problem) {
  Assignment assignment(problem);
  Queue<std::pair<std::int64_t, Nanoseconds>> queue(problem.num_owners());
  for (const int s : shapes_by(problem, [&](int shape) { return problem.bytes(shape); })) {
    for (int left = problem.num_matrices(s); left > 0; --left) {
      const int owner = queue.take([&](int candidate) { return assignment.fits(candidate, s, 1); });
      if (owner < 0) return std::nullopt;
      assignment.add(owner, s, 1);
      queue.put({assignment.bytes(owner), assignment.load(owner)}, owner);
    }
  }
  return assignment;
}

}  // namespace dmuon::balance
