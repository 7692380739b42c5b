#pragma once

namespace dmuon::schedule {

/// More would leave the integers that uses are counted in.
inline constexpr int kMostUnits = 1 << 20;

/// How a step runs. The one place of these options' defaults: dedicate_params and plans have them
/// from here.
struct StepOptions {
  bool node_copy = true;  ///< column members keep what came from other nodes until the next version
  /// Stage 1 of a unit is issued this many uses ahead; 0: everything is sent when it is needed.
  int lookahead = 2;
  /// Units whose packed weights or gradients may be in memory at once, 2 or more; 0: lookahead + 2.
  int max_units_in_flight = 0;
  bool reshard_after_forward = true;  ///< free weights between a unit's forward and its backward
  /// The backward's next weights are sent before this unit's gradients (the paper,
  /// sec:design-schedule).
  bool broadcast_before_reduce = true;
  bool asynchronous = true;  ///< step() returns while the first weights travel

  int units_in_flight() const {
    return max_units_in_flight > 0 ? max_units_in_flight : lookahead + 2;
  }
  bool operator==(const StepOptions&) const = default;
};

/// The one place of what is valid.
/// @throws InvalidArgument naming the option, what is expected and what came.
void check(const StepOptions& options);

}  // namespace dmuon::schedule
