#include "dmuon/balance/owner_time.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace dmuon::balance {

// f(0) = 0; f(k) = min over batch sizes b of f(k - b) + c[b].
OwnerTime::OwnerTime(const Shape& shape) {
  const auto size = static_cast<std::size_t>(shape.num_matrices) + 1;
  cheapest_.assign(size, kNever);
  cheapest_[0] = 0;
  last_batch_.assign(size, 0);
  for (std::size_t k = 1; k < size; ++k) {
    for (const BatchTime& batch : shape.batches) {
      const auto b = static_cast<std::size_t>(batch.size);
      if (b > k) break;
      if (cheapest_[k - b] == kNever || cheapest_[k - b] + batch.ns >= cheapest_[k]) continue;
      cheapest_[k] = cheapest_[k - b] + batch.ns;
      last_batch_[k] = batch.size;
    }
  }
  at_least_ = cheapest_;
  for (std::size_t k = size - 1; k-- > 0;) at_least_[k] = std::min(at_least_[k], at_least_[k + 1]);
}

std::vector<int> OwnerTime::batches(int k) const {
  std::vector<int> sizes;
  for (; k > 0; k -= last_batch_[static_cast<std::size_t>(k)]) {
    sizes.push_back(last_batch_[static_cast<std::size_t>(k)]);
  }
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  return sizes;
}

Problem::Problem(Instance instance) : instance_(std::move(instance)) {
  validate(instance_);
  times_.reserve(instance_.shapes.size());
  for (const Shape& shape : instance_.shapes) times_.emplace_back(shape);
}

}  // namespace dmuon::balance
