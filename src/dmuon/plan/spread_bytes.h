#pragma once

#include "dmuon/plan/strategy.h"

namespace dmuon::plan {

/// Exchanges owners among batches of one shape and size, so that nodes and columns have more equal
/// parts of each unit, and of each window of units. Then a unit's messages use both directions of
/// every link. Each owner keeps its number of matrices of each shape and its sizes of batches, so
/// loads do not change. Batches that change owners are of nearby units, so early units are still
/// updated early. Pure function, deterministic.
/// @param owner    of each parameter.
/// @param movable  parameters that may change owners. Those of single columns stay in theirs.
PerParameter<Owner> with_bytes_spread(const Problem& problem, PerParameter<Owner> owner,
                                      const PerParameter<bool>& movable);

}  // namespace dmuon::plan
