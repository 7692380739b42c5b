#pragma once

#include <cstdint>

namespace dmuon::core {

/// Returns count / by, rounded up, for count >= 0 and by > 0.
constexpr std::int64_t divided_up(std::int64_t count, std::int64_t by) {
  return (count + by - 1) / by;
}

}  // namespace dmuon::core
