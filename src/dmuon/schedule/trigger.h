#pragma once

#include <ostream>
#include <vector>

#include "dmuon/core/index.h"

namespace dmuon::schedule {

/// How far a module's use has come.
enum class Moment : int {
  kBeforeUse,      ///< a forward, a recomputation or a backward is about to read its weights
  kAfterForward,   ///< its forward is over, and its weights may go
  kAfterBackward,  ///< a backward use is over: its weights may go, and its gradients have come
};

/// What a hook says: this unit is at this moment.
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
