#pragma once

#include <limits>
#include <vector>

#include "dmuon/balance/instance.h"

namespace dmuon::balance {

/// f_s(k): what an owner takes for k matrices of one shape, run as the cheapest set of batches.
/// Neither monotone nor convex in k: nothing is assumed of measured times.
/// Immutable, so safe to share between threads.
class OwnerTime {
 public:
  /// Of what no set of batches adds up to.
  static constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();

  /// @param shape valid, except that batch sizes may be missing.
  explicit OwnerTime(const Shape& shape);

  /// @param k in [0, num_matrices]. @return kNever only if a batch of 1 is missing.
  Nanoseconds operator()(int k) const { return cheapest_[static_cast<std::size_t>(k)]; }

  /// What an owner of k or more takes at least.
  Nanoseconds at_least(int k) const { return at_least_[static_cast<std::size_t>(k)]; }

  /// The batch sizes behind operator()(k), largest first; they sum to k. Where several ways take as
  /// long, the one found with the smallest batches, on every machine the same.
  std::vector<int> batches(int k) const;

  int num_matrices() const { return static_cast<int>(cheapest_.size()) - 1; }

 private:
  std::vector<Nanoseconds> cheapest_;  // [num_matrices + 1]
  std::vector<Nanoseconds> at_least_;  // [num_matrices + 1]
  std::vector<int> last_batch_;        // [num_matrices + 1], a batch of some cheapest way
};

/// An instance with the f_s of its shapes.
class Problem {
 public:
  /// @throws InvalidArgument as validate does.
  explicit Problem(Instance instance);

  const Instance& instance() const { return instance_; }
  int num_shapes() const { return static_cast<int>(times_.size()); }
  int num_owners() const { return instance_.num_owners; }
  int num_matrices(int shape) const {
    return times_[static_cast<std::size_t>(shape)].num_matrices();
  }
  const OwnerTime& time(int shape) const { return times_[static_cast<std::size_t>(shape)]; }
  std::int64_t bytes(int shape) const {
    return instance_.shapes[static_cast<std::size_t>(shape)].bytes;
  }

 private:
  Instance instance_;
  std::vector<OwnerTime> times_;  // [shapes]
};

}  // namespace dmuon::balance
