#pragma once

#include <ostream>
#include <vector>

#include "dmuon/schedule/order.h"

namespace dmuon::schedule {

// Found by GoogleTest through argument-dependent lookup.
inline void PrintTo(const Operation& operation, std::ostream* out) {
  constexpr const char* kVerbs[] = {"unshard", "reshard", "release"};
  *out << kVerbs[static_cast<int>(operation.action)] << ' ' << operation.unit;
}

inline Operation unshard(int unit) { return {Action::kUnshard, unit}; }
inline Operation reshard(int unit) { return {Action::kReshard, unit}; }
inline Operation release(int unit) { return {Action::kRelease, unit}; }

inline std::vector<Operation> operations_of(const std::vector<Issue>& issues) {
  std::vector<Operation> operations;
  operations.reserve(issues.size());
  for (const Issue& issue : issues) operations.push_back(issue.operation);
  return operations;
}

inline void append(std::vector<Issue>* all, const std::vector<Issue>& more) {
  all->insert(all->end(), more.begin(), more.end());
}

}  // namespace dmuon::schedule
