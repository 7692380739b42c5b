#include "dmuon/balance/assignment.h"

#include <algorithm>

namespace dmuon::balance {
namespace {

// A weight for each shape; a sum of counts times weights then tells counts apart.
std::uint64_t weight(ShapeIndex shape) {
  std::uint64_t mixed = (shape.position() + 1) * 0x9e3779b97f4a7c15ULL;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
  return (mixed ^ (mixed >> 27)) | 1;
}

}  // namespace

Assignment::Assignment(const Problem& problem)
    : problem_(&problem),
      counts_(problem.num_owners(), PerShape<int>(problem.num_matrices().size())),
      loads_(problem.num_owners()),
      bytes_(problem.num_owners()),
      signatures_(problem.num_owners()) {}

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
  signatures_[owner] += static_cast<std::uint64_t>(change) * weight(shape);
  counts_[owner][shape] += change;
}

}  // namespace dmuon::balance
