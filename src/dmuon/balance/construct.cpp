#include "dmuon/balance/construct.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace dmuon::balance {
namespace {

struct Lot {
  Nanoseconds ns;
  ShapeIndex shape;
  int size;
};

// Gives a lot to the owner with the smallest key among those that it fits; among equals, to the
// first. Returns false if it fits nowhere.
template <typename Key>
bool give(Assignment& assignment, ShapeIndex shape, int size, const Key& key) {
  std::optional<std::pair<decltype(key(Owner())), Owner>> best;
  for (const Owner owner : assignment.problem().owners()) {
    if (!assignment.fits(owner, shape, size)) continue;
    const auto own = key(owner);
    if (!best || own < best->first) best = {own, owner};
  }
  if (best) assignment.add(best->second, shape, size);
  return best.has_value();
}

// If `evenly`, first gives all owners equally many matrices of a shape. Then gives the remaining
// matrices, one by one, to the cheapest owner.
std::optional<Assignment> rest_where_cheapest(const Problem& problem, bool evenly) {
  Assignment assignment(problem);
  const auto longest = [&](ShapeIndex s) {
    return problem.num_matrices(s) > 0 ? -problem.time(s)(1) : Nanoseconds{0};
  };
  for (const ShapeIndex s : core::sorted_by(problem.shapes(), longest)) {
    const int each = evenly ? problem.num_matrices(s) / problem.num_owners() : 0;
    for (const Owner owner : problem.owners()) {
      if (!assignment.fits(owner, s, each)) return std::nullopt;
      assignment.add(owner, s, each);
    }
    for (int left = problem.num_matrices(s) - each * problem.num_owners(); left > 0; --left) {
      if (!add_where_cheapest(assignment, s)) return std::nullopt;
    }
  }
  return assignment;
}

}  // namespace

bool add_where_cheapest(Assignment& assignment, ShapeIndex shape) {
  return give(assignment, shape, 1,
              [&](Owner owner) { return assignment.load_with(owner, shape, 1); });
}

std::optional<Assignment> longest_first(const Problem& problem, int lot) {
  std::vector<Lot> lots;
  for (const ShapeIndex s : problem.shapes()) {
    for (int left = problem.num_matrices(s); left > 0; left -= lots.back().size) {
      const int size = std::min(lot, left);
      lots.push_back({problem.time(s)(size), s, size});
    }
  }
  std::stable_sort(lots.begin(), lots.end(),
                   [](const Lot& a, const Lot& b) { return a.ns > b.ns; });
  Assignment assignment(problem);
  const auto load = [&](Owner owner) { return assignment.load(owner); };
  for (const Lot& next : lots) {
    if (!give(assignment, next.shape, next.size, load)) return std::nullopt;
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
  const auto held = [&](Owner owner) {
    return std::pair(assignment.bytes(owner), assignment.load(owner));
  };
  const auto largest = [&](ShapeIndex s) { return -problem.bytes(s); };
  for (const ShapeIndex s : core::sorted_by(problem.shapes(), largest)) {
    for (int left = problem.num_matrices(s); left > 0; --left) {
      if (!give(assignment, s, 1, held)) return std::nullopt;
    }
  }
  return assignment;
}

}  // namespace dmuon::balance
