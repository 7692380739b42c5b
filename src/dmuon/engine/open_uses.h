#pragma once

#include <algorithm>
#include <cstdint>

#include "dmuon/core/index.h"

namespace dmuon::engine {

/// A call that reads a unit's weights: of its own module, or of one of several that read them.
struct Call {
  bool reader = false;        ///< of one of several modules
  bool nested = false;        ///< inside of a call of the same module, which ends the use
  bool has_end = false;       ///< its inputs are watched, so its backward's end is reported
  std::int64_t backward = 0;  ///< number of the backward in which it is open, 0 if in none
};

/// Counts calls that read a unit's weights and are not over, nor are their backwards.
///
/// Not thread-safe.
class OpenUses {
 public:
  explicit OpenUses(int num_units)
      : calls_(num_units, 0), reads_(num_units, 0), backwards_(num_units, 0) {}

  void begin_call(core::UnitIndex unit) { ++calls_[unit]; }
  /// A call that raised may end twice.
  void end_call(core::UnitIndex unit) { calls_[unit] -= calls_[unit] > 0 ? 1 : 0; }

  /// The backward of a call begins. Returns false if it has begun before.
  /// @param number  of the whole backward, from 1.
  bool begin_backward(core::UnitIndex unit, Call& call, std::int64_t number) {
    if (call.backward == number) return false;
    call.backward = number;
    if (call.reader || call.has_end) ++of(call)[unit];
    return true;
  }
  /// The backward of a call ends. A call of another whole backward counts for nothing.
  void end_backward(core::UnitIndex unit, Call& call, std::int64_t number) {
    if (call.backward != number) return;
    call.backward = 0;
    --of(call)[unit];
  }

  /// True if a call is open, or the backward of a reader's: a use that readers share goes on.
  bool is_read(core::UnitIndex unit) const { return calls_[unit] > 0 || reads_[unit] > 0; }
  /// True if a hook will say that the unit's weights are not read any more.
  bool any(core::UnitIndex unit) const { return is_read(unit) || backwards_[unit] > 0; }

  /// A pass begins with a forward.
  void forget_calls() { std::fill(calls_.begin(), calls_.end(), 0); }
  /// A whole backward begins.
  void forget_backwards() {
    std::fill(reads_.begin(), reads_.end(), 0);
    std::fill(backwards_.begin(), backwards_.end(), 0);
  }

 private:
  core::Vector<core::UnitIndex, int>& of(const Call& call) {
    return call.reader ? reads_ : backwards_;
  }

  core::Vector<core::UnitIndex, int> calls_;
  core::Vector<core::UnitIndex, int> reads_;      // backwards of readers' calls
  core::Vector<core::UnitIndex, int> backwards_;  // of calls of the unit's own modules
};

}  // namespace dmuon::engine
