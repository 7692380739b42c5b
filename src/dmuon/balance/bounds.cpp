#include <algorithm>
#include <set>

#include "dmuon/balance/solve.h"

namespace dmuon::balance {
namespace {

Certificate one_owner(const Problem& problem) {
  Certificate best{.kind = Certificate::Kind::kOneOwner, .bound = -1};
  for (const ShapeIndex s : problem.shapes()) {
    const int matrices = problem.num_matrices(s);
    const int share =
        matrices / problem.num_owners() + (matrices % problem.num_owners() != 0 ? 1 : 0);
    const Nanoseconds ns = problem.time(s).at_least(share);
    if (ns <= best.bound) continue;
    best.shape = s;
    best.bound = ns;
  }
  return best;
}

// Returns the least limit within which batches no longer than the limit do all work. More batches
// never make the work longer. So for each set of batches only the least limit is checked.
Certificate all_owners(const Problem& problem) {
  const PerShape<CostedShape>& shapes = problem.instance().shapes;
  std::set<Nanoseconds> longest_batches = {0};
  for (const CostedShape& shape : shapes) {
    for (const BatchTime& batch : shape.batches) longest_batches.insert(batch.ns);
  }
  PerShape<Nanoseconds> work(shapes.size(), OwnerTime::kNever);
  Nanoseconds bound = OwnerTime::kNever;
  for (const Nanoseconds longest : longest_batches) {
    Wide all = 0;
    for (const ShapeIndex s : problem.shapes()) {
      const std::vector<BatchTime>& batches = shapes[s].batches;
      const bool has_one_so_long =
          std::any_of(batches.begin(), batches.end(),
                      [&](const BatchTime& batch) { return batch.ns == longest; });
      if (longest == 0 || has_one_so_long) work[s] = OwnerTime(shapes[s], longest).of_all();
      all += work[s];
    }
    if (std::find(work.begin(), work.end(), OwnerTime::kNever) != work.end()) continue;
    const Wide share = (all + problem.num_owners() - 1) / problem.num_owners();
    bound = std::min(bound, std::max(longest, static_cast<Nanoseconds>(share)));
  }
  return {.kind = Certificate::Kind::kAllOwners, .bound = bound};
}

}  // namespace

Certificate simple_bound(const Problem& problem) {
  const Certificate one = one_owner(problem);
  const Certificate all = all_owners(problem);
  return one.bound > all.bound ? one : all;
}

}  // namespace dmuon::balance
