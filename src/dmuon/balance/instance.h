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

/// Indexes a list with one entry for each number of matrices, from 0.
using Count = core::Index<struct CountKind>;

/// Holds products of times.
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

/// The input of eq:owner_assignment. Plain data that the search and the verifier share.
struct Instance {
  PerShape<CostedShape> shapes;
  int num_owners = 1;
  std::int64_t max_bytes = std::numeric_limits<std::int64_t>::max();  ///< of one owner

  bool operator==(const Instance&) const = default;
};

/// The largest accepted sum of all shapes' times, each matrix alone or in its cheapest batches, and
/// the largest accepted sum of bytes. So sums and differences of loads stay far inside 64 bits.
inline constexpr Nanoseconds kMaxTotalNs = Nanoseconds{1} << 60;

/// Checks an instance.
/// @throws InvalidArgument, naming the first bad part: no owner; a batch list that is empty, not
///         ascending or does not start at 1; a time, bytes or max_bytes < 0; times or bytes that
///         add up to more than kMaxTotalNs.
void validate(const Instance& instance);

}  // namespace dmuon::balance
