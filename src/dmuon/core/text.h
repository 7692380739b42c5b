#pragma once

#include <string>
#include <vector>

namespace dmuon::core {

/// "a, b, c".
inline std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : ", ") + word;
  return all;
}

}  // namespace dmuon::core
