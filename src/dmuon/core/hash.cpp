#include "dmuon/core/hash.h"

namespace dmuon::core {
namespace {

constexpr std::uint64_t kPrime = 0x100000001b3ULL;

}  // namespace

Hasher& Hasher::add(std::string_view bytes) {
  // Adds the length first, so that ("ab", "c") and ("a", "bc") differ.
  add(static_cast<std::int64_t>(bytes.size()));
  for (const char byte : bytes) state_ = (state_ ^ static_cast<unsigned char>(byte)) * kPrime;
  return *this;
}

Hasher& Hasher::add(std::int64_t value) {
  const auto bits = static_cast<std::uint64_t>(value);
  for (int shift = 0; shift < 64; shift += 8) state_ = (state_ ^ ((bits >> shift) & 0xff)) * kPrime;
  return *this;
}

}  // namespace dmuon::core
