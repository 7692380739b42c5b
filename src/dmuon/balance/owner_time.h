#pragma once

#include <limits>
#include <vector>

#include "dmuon/balance/instance.h"

namespace dmuon::balance {

/// f_s(k): an owner's time for k matrices of one shape, run as the cheapest set of batches. It is
/// neither monotone nor convex in k, because nothing is assumed of measured times.
class OwnerTime {
 public:
  /// The time of a number of matrices that no set of batches adds up to.
  static constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();

  /// @param longest  batches that take longer are ignored.
  explicit OwnerTime(const CostedShape& shape, Nanoseconds longest = kNever);

  /// @param k in [0, num_matrices]. @return kNever only if batches of 1 are ignored.
  Nanoseconds operator()(int k) const { return ways_[Count(k)].ns; }

  /// Returns the least time of an owner of k or more.
  Nanoseconds at_least(int k) const { return ways_[Count(k)].at_least; }

  /// Returns the time of all matrices together.
  Nanoseconds of_all() const { return ways_.back().ns; }

  /// Returns the batch sizes behind operator()(k), largest first; they sum to k. Among ways of
  /// equal time it returns the one with the smallest batches, the same on every machine.
  std::vector<int> batches(int k) const;

  int num_matrices() const { return ways_.size() - 1; }

 private:
  struct Way {
    Nanoseconds ns = kNever;
    Nanoseconds at_least = kNever;
    int last_batch = 0;
  };

  core::Vector<Count, Way> ways_;  // for 0 to num_matrices
};

/// An instance with the f_s of its shapes. Immutable.
class Problem {
 public:
  /// @throws InvalidArgument as validate does.
  explicit Problem(Instance instance);

  const Instance& instance() const { return instance_; }
  core::Indices<ShapeIndex> shapes() const { return times_.indices(); }
  core::Indices<Owner> owners() const { return core::Indices<Owner>(num_owners()); }
  int num_owners() const { return instance_.num_owners; }
  const PerShape<int>& num_matrices() const { return num_matrices_; }
  int num_matrices(ShapeIndex shape) const { return num_matrices_[shape]; }
  const OwnerTime& time(ShapeIndex shape) const { return times_[shape]; }
  std::int64_t bytes(ShapeIndex shape) const { return instance_.shapes[shape].bytes; }

 private:
  Instance instance_;
  PerShape<OwnerTime> times_;
  PerShape<int> num_matrices_;
};

}  // namespace dmuon::balance
