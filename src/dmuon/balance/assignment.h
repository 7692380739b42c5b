#pragma once

#include <cstdint>

#include "dmuon/balance/owner_time.h"

namespace dmuon::balance {

/// How many matrices of each shape every owner has, with what that takes. Which ones they are is
/// free, since they cost the same: placement decides it. Refers to its problem.
class Assignment {
 public:
  /// Everybody has nothing.
  explicit Assignment(const Problem& problem);

  const PerShape<int>& counts(Owner owner) const { return counts_[owner]; }
  int count(Owner owner, ShapeIndex shape) const { return counts_[owner][shape]; }
  Nanoseconds load(Owner owner) const { return loads_[owner]; }
  std::int64_t bytes(Owner owner) const { return bytes_[owner]; }
  const PerOwner<Nanoseconds>& loads() const { return loads_; }
  Nanoseconds makespan() const { return load(slowest()); }

  /// The owner with the largest load, of several the first.
  Owner slowest() const;

  /// What `owner` would take with `change` matrices of `shape` more.
  Nanoseconds load_with(Owner owner, ShapeIndex shape, int change) const;

  /// Whether `change` matrices of `shape` more stay within the instance's max_bytes.
  bool fits(Owner owner, ShapeIndex shape, int change) const;

  /// The bytes of the fullest owner.
  std::int64_t most_bytes() const;

  /// Gives `owner` that many matrices more, or fewer; not checked against what there is.
  void add(Owner owner, ShapeIndex shape, int change);

  const Problem& problem() const { return *problem_; }

 private:
  const Problem* problem_;
  PerOwner<PerShape<int>> counts_;
  PerOwner<Nanoseconds> loads_;
  PerOwner<std::int64_t> bytes_;
};

}  // namespace dmuon::balance
