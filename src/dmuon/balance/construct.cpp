#include "dmuon/balance/construct.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace dmuon::balance {
namespace {

struct Lot {
  Nanoseconds ns;
  int shape;
  int size;
};

// The owner with the smallest key of those that `size` matrices more fit, of several the first; -1
// if they fit nowhere.
template <typename Key>
int first_by(const Assignment& assignment, int shape, int size, const Key& key) {
  int best = -1;
  decltype(key(0)) least{};
  for (int owner = 0; owner < assignment.problem().num_owners(); ++owner) {
    if (!assignment.fits(owner, shape, size)) continue;
    const auto own = key(owner);
    if (best >= 0 && own >= least) continue;
    best = owner;
    least = own;
  }
  return best;
}

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
  return first_by(assignment, shape, 1,
                  [&](int owner) { return assignment.load_with(owner, shape, 1); });
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
  for (const Lot& next : lots) {
    const int owner = first_by(assignment, next.shape, next.size,
                               [&](int candidate) { return assignment.load(candidate); });
    if (owner < 0) return std::nullopt;
    assignment.add(owner, next.shape, next.size);
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
  for (const int s : shapes_by(problem, [&](int shape) { return problem.bytes(shape); })) {
    for (int left = problem.num_matrices(s); left > 0; --left) {
      const int owner = first_by(assignment, s, 1, [&](int candidate) {
        return std::pair(assignment.bytes(candidate), assignment.load(candidate));
      });
      if (owner < 0) return std::nullopt;
      assignment.add(owner, s, 1);
    }
  }
  return assignment;
}

}  // namespace dmuon::balance
