#pragma once

#include <optional>

#include "dmuon/balance/assignment.h"

namespace dmuon::balance {

/// First assignments, from which local search goes on. Each does without local search, and keeps
/// owners within max_bytes or returns nothing.

/// Longest processing time first: lots of at most `lot` matrices of a shape, the longest first, to
/// the owner that has least (Graham 1969, whose bound holds for lot = 1 and batches that gain
/// nothing).
std::optional<Assignment> longest_first(const Problem& problem, int lot);

/// Shape after shape, each matrix to the owner that ends least loaded with it, its batches counted.
std::optional<Assignment> least_loaded(const Problem& problem);

/// All owners have as many matrices of each shape, and the rest goes to the least loaded.
std::optional<Assignment> even(const Problem& problem);

/// The owner with fewest bytes gets the next matrix, largest first: what fits a tight max_bytes.
std::optional<Assignment> fewest_bytes(const Problem& problem);

/// Gives one matrix more to the owner that ends least loaded with it; false if it fits nowhere.
bool add_where_cheapest(Assignment& assignment, ShapeIndex shape);

}  // namespace dmuon::balance
