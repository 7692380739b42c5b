#pragma once

#include <ostream>
#include <vector>

#include "dmuon/schedule/order.h"

namespace dmuon::schedule {

inline Trigger before_use(int unit) { return {Moment::kBeforeUse, core::UnitIndex(unit)}; }
inline Trigger after_forward(int unit) { return {Moment::kAfterForward, core::UnitIndex(unit)}; }
inline Trigger after_backward(int unit) { return {Moment::kAfterBackward, core::UnitIndex(unit)}; }

inline std::vector<Trigger> triggers_of(const std::vector<Crossing>& issues) {
  std::vector<Trigger> triggers;
  triggers.reserve(issues.size());
  for (const Crossing& issue : issues) triggers.push_back(issue.trigger);
  return triggers;
}

inline void append(std::vector<Crossing>* all, const std::vector<Crossing>& more) {
  all->insert(all->end(), more.begin(), more.end());
}

}  // namespace dmuon::schedule
