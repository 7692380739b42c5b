#include "dmuon/balance/bounds.h"

#include <algorithm>
#include <limits>
#include <optional>
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

// What all matrices of a shape take with batches of at most `limit`; nothing if not even a single
// one is short enough. Kept for the last limits, which differ in few batches.
class LimitedTime {
 public:
  explicit LimitedTime(const Shape& shape) : shape_(&shape) {}

  std::optional<Nanoseconds> operator()(Nanoseconds limit) {
    Shape limited = *shape_;
    std::erase_if(limited.batches, [&](const BatchTime& batch) { return batch.ns > limit; });
    if (shape_->num_matrices == 0) return 0;
    for (const auto& [batches, ns] : known_) {
      if (batches == limited.batches) return ns;
    }
    const auto ns = cheapest(limited);
    known_.emplace_back(limited.batches, ns);
    return ns;
  }

 private:
  // As OwnerTime, but single matrices may be missing.
  static std::optional<Nanoseconds> cheapest(const Shape& shape) {
    const auto never = std::numeric_limits<Nanoseconds>::max();
    std::vector<Nanoseconds> ns(static_cast<std::size_t>(shape.num_matrices) + 1, never);
    ns[0] = 0;
    for (std::size_t k = 1; k < ns.size(); ++k) {
      for (const BatchTime& batch : shape.batches) {
        const auto b = static_cast<std::size_t>(batch.size);
        if (b <= k && ns[k - b] != never) ns[k] = std::min(ns[k], ns[k - b] + batch.ns);
      }
    }
    if (ns.back() == never) return std::nullopt;
    return ns.back();
  }

  const Shape* shape_;
  std::vector<std::pair<std::vector<BatchTime>, std::optional<Nanoseconds>>> known_;
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
      const auto ns = time(limit);
      if (!ns) return false;
      total += *ns;
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
