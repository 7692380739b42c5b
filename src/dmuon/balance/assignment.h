#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/balance/owner_time.h"
#include "dmuon/core/grid.h"

namespace dmuon::balance {

/// How many matrices of each shape every owner has, with what that takes. Which ones they are is
/// free, since they cost the same: placement decides it. Refers to its problem.
class Assignment {
 public:
  /// Everybody has nothing.
  explicit Assignment(const Problem& problem);

  int count(int owner, int shape) const { return counts_(owner, shape); }
  Nanoseconds load(int owner) const { return loads_[static_cast<std::size_t>(owner)]; }
  std::int64_t bytes(int owner) const { return bytes_[static_cast<std::size_t>(owner)]; }
  const std::vector<Nanoseconds>& loads() const { return loads_; }
  Nanoseconds makespan() const { return load(slowest()); }

  /// The owner with the largest load, of several the first.
  int slowest() const;

  /// What `owner` would take with `change` matrices of `shape` more.
  Nanoseconds load_with(int owner, int shape, int change) const;

  /// Whether `change` matrices of `shape` more stay within the instance's max_bytes.
  bool fits(int owner, int shape, int change) const;
  bool fits(int owner) const { return bytes(owner) <= problem_->instance().max_bytes; }

  /// Whether all owners do.
  bool fits() const;

  void add(int owner, int shape, int change);

  /// Equal for owners that have the same counts.
  std::uint64_t signature(int owner) const { return signatures_[static_cast<std::size_t>(owner)]; }

  const Problem& problem() const { return *problem_; }

 private:
  const Problem* problem_;
  core::Grid<int> counts_;                 // [owners][shapes]
  std::vector<Nanoseconds> loads_;         // [owners]
  std::vector<std::int64_t> bytes_;        // [owners]
  std::vector<std::uint64_t> signatures_;  // [owners]
};

}  // namespace dmuon::balance
