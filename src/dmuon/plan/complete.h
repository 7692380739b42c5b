#pragma once

#include "dmuon/plan/plan.h"

namespace dmuon::plan {

/// Fills what follows from the rest of the plan: loads, memory, spread.
/// @throws InvalidArgument unless owners are in range and batches are each of one shape and one
///         owner, have measured sizes, and together hold every matrix once.
void complete(Plan& plan);

}  // namespace dmuon::plan
