#pragma once

#include <string_view>

namespace dmuon::schedule {

/// Limits lookahead and units in flight, so that counts of uses fit into int.
inline constexpr int kMostUnits = 1 << 20;

/// The options by which a step runs. Their defaults stand here alone: dedicate_params and plans
/// read them.
struct StepOptions {
  bool node_copy = true;  ///< column members keep weights of other nodes until the next version
  /// Stage 1 of a unit is issued this many uses ahead; 0: all weights are sent when needed.
  int lookahead = 2;
  /// Units whose packed weights or gradients may be in memory at once, 2 or more; 0: lookahead + 2.
  int max_units_in_flight = 0;
  bool reshard_after_forward = true;  ///< free weights between a unit's forward and its backward
  /// step() does not wait for the update: the next forward waits for each unit's weights.
  bool late_updates = false;
  /// Every rank has all weights until the next version, which step() sends right away. Excludes
  /// node copies, which the weights themselves replace, and reshard_after_forward.
  bool replicated = false;

  int units_in_flight() const {
    return max_units_in_flight > 0 ? max_units_in_flight : lookahead + 2;
  }
  bool operator==(const StepOptions&) const = default;
};

/// Returns the value of StepOptions::late_updates where the user names none: true where an update
/// finds waits to hide behind.
inline bool updates_late(bool on_cpu, int num_replicates) { return !on_cpu || num_replicates > 1; }

/// Checks the options.
/// @param function  named in the error.
/// @throws InvalidArgument naming the function, the option, the expected and the given value.
void check(const StepOptions& options, std::string_view function = "StepOptions");

}  // namespace dmuon::schedule
