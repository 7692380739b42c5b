#include "dmuon/balance/owner_time.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace dmuon::balance {

// f(0) = 0; f(k) = min over batch sizes b of f(k - b) + c[b].
OwnerTime::OwnerTime(const CostedShape& shape, Nanoseconds longest)
    : ways_(shape.num_matrices + 1) {
  ways_[Count(0)].ns = 0;
  for (int k = 1; k <= num_matrices(); ++k) {
    Way& way = ways_[Count(k)];
    for (const BatchTime& batch : shape.batches) {
      if (batch.size > k) break;
      const Nanoseconds rest = ways_[Count(k - batch.size)].ns;
      if (batch.ns > longest || rest == kNever || rest + batch.ns >= way.ns) continue;
      way.ns = rest + batch.ns;
      way.last_batch = batch.size;
    }
  }
  Nanoseconds least = kNever;
  for (int k = num_matrices(); k >= 0; --k) {
    least = std::min(least, ways_[Count(k)].ns);
    ways_[Count(k)].at_least = least;
  }
}

std::vector<int> OwnerTime::batches(int k) const {
  std::vector<int> sizes;
  for (; k > 0; k -= sizes.back()) sizes.push_back(ways_[Count(k)].last_batch);
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  return sizes;
}

Problem::Problem(Instance instance) : instance_(std::move(instance)) {
  validate(instance_);
  for (const CostedShape& shape : instance_.shapes) {
    times_.emplace_back(shape);
    num_matrices_.push_back(shape.num_matrices);
  }
}

}  // namespace dmuon::balance
