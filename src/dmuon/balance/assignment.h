#pragma once

#include <cstdint>

#include "dmuon/balance/owner_time.h"

namespace dmuon::balance {

/// The number of matrices of each shape at every owner, with each owner's load and bytes. Matrices
/// of one shape cost the same, so placement decides later which of them an owner gets. Points to
/// its problem, which must outlive it.
class Assignment {
 public:
  /// Starts with no matrix at any owner.
  explicit Assignment(const Problem& problem);

  const PerShape<int>& counts(Owner owner) const { return counts_[owner]; }
  int count(Owner owner, ShapeIndex shape) const { return counts_[owner][shape]; }
  Nanoseconds load(Owner owner) const { return loads_[owner]; }
  std::int64_t bytes(Owner owner) const { return bytes_[owner]; }
  const PerOwner<Nanoseconds>& loads() const { return loads_; }
  Nanoseconds makespan() const { return load(slowest()); }

  /// Returns the owner with the largest load; among equals the first.
  Owner slowest() const;

  /// Returns the load of `owner` with `change` more matrices of `shape`.
  Nanoseconds load_with(Owner owner, ShapeIndex shape, int change) const;

  /// True if `owner` stays within the instance's max_bytes with `change` more matrices of `shape`.
  bool fits(Owner owner, ShapeIndex shape, int change) const;

  /// Returns the bytes of the fullest owner.
  std::int64_t most_bytes() const;

  /// Adds `change` matrices of `shape` to `owner`, or removes them if negative. Unchecked.
  void add(Owner owner, ShapeIndex shape, int change);

  const Problem& problem() const { return *problem_; }

 private:
  const Problem* problem_;
  PerOwner<PerShape<int>> counts_;
  PerOwner<Nanoseconds> loads_;
  PerOwner<std::int64_t> bytes_;
};

}  // namespace dmuon::balance
