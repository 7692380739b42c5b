#pragma once

#include <cstdint>

#include "dmuon/balance/assignment.h"

namespace dmuon::balance {

/// Each of these leaves the makespan no larger, keeps owners within the instance's max_bytes that
/// were, ends at a makespan of `target` or less, and is limited by counted tries: a limit on time
/// would make the answer depend on the machine.

/// While it helps: the slowest owner gives some matrices of one shape to another owner and takes
/// some of another shape for them, whichever makes the slower of the two fastest.
void exchange(Assignment& assignment, Nanoseconds target, int max_exchanges);

/// While it helps: what the slowest owner and a faster one have together is divided anew, as well
/// as a dynamic program over rounded loads can. @return the number of pairs tried.
int divide_pairs(Assignment& assignment, Nanoseconds target, int max_rounds, int max_pairs);

/// Divides what two owners have together. @param cells to which loads are rounded.
/// @return whether the slower of the two is faster now.
bool divide_pair(Assignment& assignment, int a, int b, int cells);

/// Ways out where no exchange and no pair helps.

/// Mixes up a few owners at random, repairs them by divide_pair, keeps what is no worse.
/// @param max_pairs about as many pairs are divided.
/// @param seed      another one goes another way.
void iterate(Assignment& assignment, Nanoseconds target, int max_pairs, std::uint64_t seed);

/// Random exchanges between any two owners, which may also lengthen what exceeds the target, ever
/// less (threshold accepting).
void anneal(Assignment& assignment, Nanoseconds target, std::int64_t num_steps, std::uint64_t seed);

}  // namespace dmuon::balance
