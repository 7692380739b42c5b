#pragma once

#include <vector>

#include "dmuon/simulate/execution.h"

namespace dmuon::simulate {

/// A time in which one operation of one rank was done, and what came after waited for it.
struct PathPart {
  core::Owner rank{};
  int issue = 0;
  double begin_us = 0;
  double end_us = 0;
};

/// Splits the time until an operation's end into the operations, of any rank, that it waited for.
/// If the operation itself took time, it is the last part.
/// @param from_us  the path begins here, or where the programs begin.
/// @returns parts in ascending order. Each begins where the one before it ends; none is empty.
std::vector<PathPart> critical_path(const Execution& execution, core::Owner rank, int issue,
                                    double from_us);

}  // namespace dmuon::simulate
