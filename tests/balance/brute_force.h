#pragma once

#include "dmuon/balance/instance.h"

namespace dmuon::balance {

/// Plain references that share nothing with the module but the instance. Exponential.

/// The least time for k matrices of a shape over every way to split them into batches.
Nanoseconds cheapest_split(const CostedShape& shape, int k);

/// The least makespan over every way to give each matrix an owner that keeps to max_bytes; -1 if
/// there is none.
Nanoseconds optimum(const Instance& instance);

}  // namespace dmuon::balance
