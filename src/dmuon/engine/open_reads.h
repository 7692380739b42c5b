#pragma once

#include <algorithm>
#include <cstdint>

#include "dmuon/core/index.h"

namespace dmuon::engine {

/// A call of one of several modules that read a unit's weights.
struct Read {
  std::int64_t backward = 0;  ///< number of the backward in which it is open, 0 if in none
};

/// Counts calls that read a unit's weights and are not over: its use goes on while there are any.
///
/// Not thread-safe.
class OpenReads {
 public:
  explicit OpenReads(int num_units) : calls_(num_units, 0), backwards_(num_units, 0) {}

  void begin_call(core::UnitIndex unit) { ++calls_[unit]; }
  /// A call that raised may end twice.
  void end_call(core::UnitIndex unit) { calls_[unit] -= calls_[unit] > 0 ? 1 : 0; }

  /// The backward of a call begins. Returns false if it has begun before.
  /// @param number  of the whole backward, from 1.
  bool begin_backward(core::UnitIndex unit, Read* read, std::int64_t number) {
    if (read->backward == number) return false;
    read->backward = number;
    ++backwards_[unit];
    return true;
  }
  /// The backward of a call ends. A call of another whole backward counts for nothing.
  void end_backward(core::UnitIndex unit, Read* read, std::int64_t number) {
    if (read->backward != number) return;
    read->backward = 0;
    --backwards_[unit];
  }

  /// True if no call, nor the backward of one, is reading the unit's weights.
  bool none(core::UnitIndex unit) const { return calls_[unit] == 0 && backwards_[unit] == 0; }

  /// A forward begins outside of any call.
  void forget_calls() { std::fill(calls_.begin(), calls_.end(), 0); }
  /// A whole backward begins.
  void forget_backwards() { std::fill(backwards_.begin(), backwards_.end(), 0); }

 private:
  core::Vector<core::UnitIndex, int> calls_, backwards_;
};

}  // namespace dmuon::engine
