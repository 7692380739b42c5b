#pragma once

#include <ostream>
#include <vector>

#include "dmuon/core/index.h"

namespace dmuon::schedule {

/// A moment in the use of a module.
enum class Moment : int {
  kBeforeUse,      ///< a forward, a recomputation or a backward is about to read its weights
  kAfterForward,   ///< its forward is over, and its weights may be freed
  kAfterBackward,  ///< a backward use is over: weights may be freed, gradients have come
};

/// A hook's report: this unit is at this moment.
struct Trigger {
  Moment moment{};
  core::UnitIndex unit;
  bool operator==(const Trigger&) const = default;
};

/// The triggers of one pass, as traced.
using Trace = std::vector<Trigger>;

enum class Pass : int { kTrainForward, kEvalForward, kBackward };

/// Prints like "before use of 3".
std::ostream& operator<<(std::ostream& out, const Trigger& trigger);

}  // namespace dmuon::schedule
