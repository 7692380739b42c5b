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

/// Returns the path of operations, of any rank, that leads to the end of this one: each began when
/// the one before it ended. The last part is the operation's own work.
/// @param from_us  the path begins here, or where the programs begin.
/// @returns parts in ascending order. Each begins where the one before it ends; none is empty.
std::vector<PathPart> critical_path(const Execution& execution, core::Owner rank, int issue,
                                    double from_us);

}  // namespace dmuon::simulate
