#pragma once

#include <string>
#include <utility>
#include <vector>

#include "dmuon/watch/report.h"

namespace dmuon::watch {

/// Has issued these, and waits for nobody.
inline Report issued(const std::vector<std::string>& operations) {
  Report report;
  for (const std::string& what : operations) report.issue(what);
  return report;
}

/// The same, in a wait.
inline Report waits(Report report, Rendezvous what, std::int64_t number) {
  report.awaited = what;
  report.number = number;
  report.where = "what is awaited";
  return report;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace dmuon::watch
