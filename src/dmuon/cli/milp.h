#pragma once

#include <vector>

#include "dmuon/balance/instance.h"

namespace dmuon::cli {

/// eq:owner_assignment by SciPy, in a Python process: python/dmuon/_planning/milp.py of the Python that the
/// command was installed with, of DMUON_PYTHON, or python3.
/// @return [num_owners][shapes] matrices; if not proved optimal, a line on standard error says so.
/// @throws InvalidArgument with what that process says: no such Python, no SciPy, too many
///         variables, nothing found within a minute.
std::vector<std::vector<int>> milp_counts(const balance::Instance& instance);

}  // namespace dmuon::cli
