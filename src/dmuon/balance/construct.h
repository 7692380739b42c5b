#pragma once

#include <optional>

#include "dmuon/balance/assignment.h"

namespace dmuon::balance {

/// First assignments, which local search then improves. Each keeps all owners within max_bytes or
/// returns nothing.

/// Longest processing time first: gives lots of at most `lot` matrices of a shape, the longest
/// first, to the owner with the least load. Graham's bound (1969) holds for lot = 1 if batches gain
/// nothing.
std::optional<Assignment> longest_first(const Problem& problem, int lot);

/// Goes shape by shape. Gives each matrix to the owner whose load, batches counted, is then least.
std::optional<Assignment> least_loaded(const Problem& problem);

/// Gives all owners equally many matrices of each shape, and the rest to the least loaded.
std::optional<Assignment> even(const Problem& problem);

/// Gives the next matrix, largest first, to the owner with fewest bytes. Fits a tight max_bytes.
std::optional<Assignment> fewest_bytes(const Problem& problem);

/// Adds one matrix to the owner whose load is then least. Returns false if it fits nowhere.
bool add_where_cheapest(Assignment& assignment, ShapeIndex shape);

}  // namespace dmuon::balance
