#pragma once

#include <cstdint>
#include <string_view>

namespace dmuon::core {

/// Computes a 64-bit hash, equal on every machine for equal input (FNV-1a).
/// Ranks compare hashes to check that they hold the same plan and have issued
/// the same operations. It does not protect against an adversary.
/// Not thread-safe.
class Hasher {
 public:
  Hasher& add(std::string_view bytes);
  Hasher& add(std::int64_t value);

  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325ULL;
};

}  // namespace dmuon::core
