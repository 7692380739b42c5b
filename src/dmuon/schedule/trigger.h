#pragma once

#include <ostream>

namespace dmuon::schedule {

/// How far a module's use has come.
enum class Moment : int {
  kBeforeUse,      ///< a forward, a recomputation or a backward is about to read its weights
  kAfterForward,   ///< its forward is over, and its weights may go
  kAfterBackward,  ///< a backward use is over: its weights may go, and its gradients have come
};

/// What a hook says: this unit is at this moment.
struct Trigger {
  Moment moment;
  int unit;
  bool operator==(const Trigger&) const = default;
};

enum class Pass : int { kTrainForward, kEvalForward, kBackward };

/// Prints like "before use of 3".
std::ostream& operator<<(std::ostream& out, const Trigger& trigger);

}  // namespace dmuon::schedule
