#pragma once

#include "dmuon/balance/assignment.h"

namespace dmuon::balance {

/// Local search. While the makespan is above `target` and it helps: the slowest owner gives some
/// matrices of one shape to another owner and takes some of another shape for them, whichever makes
/// the slower of the two fastest. Owners that were within max_bytes stay so. Ended after
/// `max_exchanges`: a limit on time would make the answer depend on the machine.
void exchange(Assignment& assignment, Nanoseconds target, int max_exchanges);

}  // namespace dmuon::balance
