#include "dmuon/balance/assignment.h"

#include <algorithm>

namespace dmuon::balance {

Assignment::Assignment(const Problem& problem)
    : problem_(&problem),
      counts_(problem.num_owners(), PerShape<int>(problem.num_matrices().size())),
      loads_(problem.num_owners()),
      bytes_(problem.num_owners()) {}

Owner Assignment::slowest() const {
  return Owner(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
}

Nanoseconds Assignment::load_with(Owner owner, ShapeIndex shape, int change) const {
  const OwnerTime& time = problem_->time(shape);
  const int has = count(owner, shape);
  return load(owner) + time(has + change) - time(has);
}

bool Assignment::fits(Owner owner, ShapeIndex shape, int change) const {
  return bytes(owner) + change * problem_->bytes(shape) <= problem_->instance().max_bytes;
}

std::int64_t Assignment::most_bytes() const {
  return *std::max_element(bytes_.begin(), bytes_.end());
}

void Assignment::add(Owner owner, ShapeIndex shape, int change) {
  loads_[owner] = load_with(owner, shape, change);
  bytes_[owner] += change * problem_->bytes(shape);
  counts_[owner][shape] += change;
}

}  // namespace dmuon::balance
