#pragma once

#include <cstdint>

#include "dmuon/balance/instance.h"

namespace dmuon::balance {

/// Proves that no assignment of an instance has a makespan below `bound`. Each kind is an argument
/// in whole numbers; verify() checks it without the code that found it. Plain data.
struct Certificate {
  enum class Kind {
    /// Some owner has at least ceil(n_s / owners) matrices of `shape`, and takes `bound` for them.
    kOneOwner,
    /// Under `bound` some batches are too long for any owner. The cheapest way to run all matrices
    /// with the others takes more than owners * (bound - 1).
    kAllOwners,
    /// At these prices all work together is worth more than `owners` times the most that one owner
    /// can do within bound - 1. The work of shape s is worth per_matrix[s] for each matrix and
    /// per_ns[s] for each nanosecond. Its matrices take f_s(n_s) or more, in any split.
    kPatterns,
  };

  Kind kind = Kind::kAllOwners;
  Nanoseconds bound = 0;
  ShapeIndex shape{-1};                    ///< of kOneOwner
  PerShape<std::int64_t> per_matrix = {};  ///< >= 0, of kPatterns
  PerShape<std::int64_t> per_ns = {};      ///< >= 0, of kPatterns
  int cells = 0;  ///< of kPatterns: loads are rounded down to (bound - 1) / cells

  bool operator==(const Certificate&) const = default;
};

}  // namespace dmuon::balance
