#pragma once

#include <cstddef>

namespace dmuon::core {

/// An array with one value for each of the first kSize values of an enum, which count from 0.
/// Like a plain array it is an aggregate: `ByEnum<Lane, double, kNumLanes> seconds{};`
template <typename Enum, typename T, int kSize>
struct ByEnum {
  T values[static_cast<std::size_t>(kSize)];

  constexpr T& operator[](Enum of) { return values[static_cast<std::size_t>(of)]; }
  constexpr const T& operator[](Enum of) const { return values[static_cast<std::size_t>(of)]; }
  constexpr T* begin() { return values; }
  constexpr T* end() { return values + kSize; }
  constexpr const T* begin() const { return values; }
  constexpr const T* end() const { return values + kSize; }
  bool operator==(const ByEnum&) const = default;
};

/// The values of an enum that counts from 0, for range-based loops.
template <typename Enum, int kSize>
struct EachOf {
  struct Iterator {
    int at;
    constexpr Enum operator*() const { return static_cast<Enum>(at); }
    constexpr Iterator& operator++() {
      ++at;
      return *this;
    }
    constexpr bool operator==(const Iterator&) const = default;
  };
  constexpr Iterator begin() const { return {0}; }
  constexpr Iterator end() const { return {kSize}; }
};

}  // namespace dmuon::core
