#pragma once

#include <vector>

#include "dmuon/balance/assignment.h"
#include "dmuon/balance/certificate.h"

// Threads: a function of this folder writes only to arguments that are not const. Threads may share
// an object while none changes it.
namespace dmuon::balance {

/// Returns the larger of two bounds that need no search; see Certificate::Kind for the arguments.
Certificate simple_bound(const Problem& problem);

/// Returns a bound with the argument that proves it. Bounds ignore max_bytes, which can only make
/// assignments slower.
/// @param upper some assignment's makespan; the bound never exceeds it.
Certificate lower_bound(const Problem& problem, Nanoseconds upper);

struct Solution {
  Assignment assignment;
  Certificate certificate;
};

/// Solves eq:owner_assignment. The makespan is small, and never above the one of longest_first or
/// least_loaded. The certificate bounds every makespan from below. Takes about a second at most.
/// Deterministic: equal on every machine that computes IEEE doubles without contracting them.
/// @throws InvalidArgument if no assignment was found that keeps to max_bytes.
Solution solve(const Problem& problem);

/// Returns assignments of at most `limit` that local search has changed as little as needed, those
/// that began with equal shares first. They suit a layout better than the best balance does.
std::vector<Assignment> alternatives(const Problem& problem, Nanoseconds limit);

/// Returns the smallest max_bytes for which solve() surely finds an assignment.
std::int64_t sufficient_bytes(const Problem& problem);

}  // namespace dmuon::balance
