#include "dmuon/balance/bounds.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace dmuon::balance {
namespace {

Certificate one_owner(const Problem& problem) {
  Certificate best;
  best.kind = Certificate::Kind::kOneOwner;
  for (int s = 0; s < problem.num_shapes(); ++s) {
    const int most = problem.num_matrices(s) / problem.num_owners() +
                     (problem.num_matrices(s) % problem.num_owners() != 0 ? 1 : 0);
    const Nanoseconds ns = problem.time(s).at_least(most);
    if (best.shape >= 0 && ns <= best.bound) continue;
    best.shape = s;
    best.bound = ns;
  }
  return best;
}

// What all matrices of a shape take with batches of at most `limit`; OwnerTime::kNever if not even
// a single one is short enough. Kept for the last limits, which differ in few batches.
class LimitedTime {
 public:
  explicit LimitedTime(const Shape& shape) : shape_(&shape) {}

  Nanoseconds operator()(Nanoseconds limit) {
    Shape limited = *shape_;
    std::erase_if(limited.batches, [&](const BatchTime& batch) { return batch.ns > limit; });
    if (shape_->num_matrices == 0) return 0;
    for (const auto& [batches, ns] : known_) {
      if (batches == limited.batches) return ns;
    }
    const Nanoseconds ns = OwnerTime(limited)(limited.num_matrices);
    known_.emplace_back(limited.batches, ns);
    return ns;
  }

 private:
  const Shape* shape_;
  std::vector<std::pair<std::vector<BatchTime>, Nanoseconds>> known_;
};

Certificate all_owners(const Problem& problem) {
  std::vector<LimitedTime> times;
  Nanoseconds enough = 0;
  for (int s = 0; s < problem.num_shapes(); ++s) {
    times.emplace_back(problem.instance().shapes[static_cast<std::size_t>(s)]);
    enough += problem.time(s)(problem.num_matrices(s));
  }
  // With few matrices a cheap set of batches may need one that is longer than all of them alone.
  for (const Shape& shape : problem.instance().shapes) {
    for (const BatchTime& batch : shape.batches) enough = std::max(enough, batch.ns);
  }
  const auto possible = [&](Nanoseconds limit) {
    Wide total = 0;
    for (LimitedTime& time : times) {
      const Nanoseconds ns = time(limit);
      if (ns == OwnerTime::kNever) return false;
      total += ns;
    }
    return total <= Wide{limit} * problem.num_owners();
  };
  Nanoseconds low = 0;
  Nanoseconds high = enough;
  while (low < high) {
    const Nanoseconds middle = low + (high - low) / 2;
    if (possible(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  Certificate certificate;
  certificate.kind = Certificate::Kind::kAllOwners;
  certificate.bound = low;
  return certificate;
}

}  // namespace

Certificate simple_bound(const Problem& problem) {
  const Certificate one = one_owner(problem);
  const Certificate all = all_owners(problem);
  return one.bound > all.bound ? one : all;
}

}  // namespace dmuon::balance
