#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "dmuon/core/index.h"

namespace dmuon::balance {

using core::Owner;
using core::PerOwner;
using core::PerShape;
using core::ShapeIndex;

/// Times are whole nanoseconds, so that a plan is the same on every machine and a bound is exact.
using Nanoseconds = std::int64_t;

/// A number of matrices, from 0, in a list with an entry for each.
using Count = core::Index<struct CountKind>;

/// Products of times.
__extension__ using Wide = __int128;

/// One candidate batch of a shape: `size` matrices together take `ns`.
struct BatchTime {
  int size = 1;
  Nanoseconds ns = 0;

  bool operator==(const BatchTime&) const = default;
};

/// Matrices that cost the same: n_s of them, and c[s,b] for b in B_s (paper, sec:loadbalance).
struct CostedShape {
  int num_matrices = 0;
  std::vector<BatchTime> batches;  ///< ascending sizes, the first of them 1
  std::int64_t bytes = 0;          ///< that one matrix takes at its owner, for `max_bytes`

  bool operator==(const CostedShape&) const = default;
};

/// What eq:owner_assignment decides upon. Plain data, which the search and the verifier share.
struct Instance {
  PerShape<CostedShape> shapes;
  int num_owners = 1;
  std::int64_t max_bytes = std::numeric_limits<std::int64_t>::max();  ///< of one owner

  bool operator==(const Instance&) const = default;
};

/// The largest sum of all shapes' times, each matrix alone or in its cheapest batches, that is
/// accepted, and of all bytes: sums and differences of loads then stay far inside 64 bits.
inline constexpr Nanoseconds kMaxTotalNs = Nanoseconds{1} << 60;

/// @throws InvalidArgument, naming the first bad part: no owner, a batch list that is empty, not
///         ascending or does not start at 1, a time < 0, times that add up to more than
///         kMaxTotalNs, bytes or max_bytes < 0, bytes that add up to more than that.
void validate(const Instance& instance);

}  // namespace dmuon::balance
