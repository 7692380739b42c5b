#pragma once

#include "dmuon/balance/assignment.h"

namespace dmuon::balance {

/// Local search, which writes `assignment` only. Repeats the best exchange while the makespan is
/// above `target` and it helps: the slowest owner swaps some matrices of one shape for some of
/// another owner's of another shape. The best exchange makes the slower of the two owners fastest.
/// Owners within max_bytes stay within. Stops after `max_exchanges`; a limit on time would make the
/// answer depend on the machine.
void exchange(Assignment& assignment, Nanoseconds target, int max_exchanges);

}  // namespace dmuon::balance
