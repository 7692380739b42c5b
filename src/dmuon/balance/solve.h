#pragma once

#include <vector>

#include "dmuon/balance/assignment.h"
#include "dmuon/balance/certificate.h"

namespace dmuon::balance {

/// The larger of two bounds that need no search; see Certificate::Kind for the arguments.
Certificate simple_bound(const Problem& problem);

/// A bound with the argument that proves it. Bounds leave max_bytes out, which can only make
/// assignments slower.
/// @param upper some assignment's makespan; the bound never exceeds it.
Certificate lower_bound(const Problem& problem, Nanoseconds upper);

struct Solution {
  Assignment assignment;
  Certificate certificate;
};

/// eq:owner_assignment: a small makespan, never above that of longest_first or least_loaded, and a
/// bound on how small any could be.
/// Deterministic: equal on every machine that computes IEEE doubles without contracting them.
/// @throws InvalidArgument if no assignment was found that keeps to max_bytes.
Solution solve(const Problem& problem);

/// Assignments of at most `limit` that local search has changed as little as it takes: those that
/// begin with equal shares of every shape first. They suit a layout better than the best balance.
std::vector<Assignment> alternatives(const Problem& problem, Nanoseconds limit);

/// The smallest max_bytes for which solve() surely finds an assignment.
std::int64_t sufficient_bytes(const Problem& problem);

}  // namespace dmuon::balance
