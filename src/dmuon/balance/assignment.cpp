#include "dmuon/balance/assignment.h"

#include <algorithm>

namespace dmuon::balance {
namespace {

// A weight for each shape; a sum of counts times weights then tells counts apart.
std::uint64_t weight(int shape) {
  std::uint64_t mixed = (static_cast<std::uint64_t>(shape) + 1) * 0x9e3779b97f4a7c15ULL;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
  return (mixed ^ (mixed >> 27)) | 1;
}

}  // namespace

Assignment::Assignment(const Problem& problem)
    : problem_(&problem),
      counts_(problem.num_owners(), problem.num_shapes()),
      loads_(static_cast<std::size_t>(problem.num_owners())),
      bytes_(loads_.size()),
      signatures_(loads_.size()) {}

int Assignment::slowest() const {
  return static_cast<int>(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
}

Nanoseconds Assignment::load_with(int owner, int shape, int change) const {
  const OwnerTime& time = problem_->time(shape);
  const int has = count(owner, shape);
  return load(owner) + time(has + change) - time(has);
}

bool Assignment::fits(int owner, int shape, int change) const {
  return bytes(owner) + change * problem_->bytes(shape) <= problem_->instance().max_bytes;
}

bool Assignment::fits() const {
  for (int owner = 0; owner < problem_->num_owners(); ++owner) {
    if (!fits(owner)) return false;
  }
  return true;
}

void Assignment::add(int owner, int shape, int change) {
  const auto o = static_cast<std::size_t>(owner);
  loads_[o] = load_with(owner, shape, change);
  bytes_[o] += change * problem_->bytes(shape);
  signatures_[o] += static_cast<std::uint64_t>(change) * weight(shape);
  counts_(owner, shape) += change;
}

}  // namespace dmuon::balance
