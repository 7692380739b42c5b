#pragma once

#include <cstdint>

#include "dmuon/schedule/step_options.h"

namespace dmuon::plan {

/// What a plan should heed besides time.
struct Options {
  Options() : Options(schedule::StepOptions{}) {}
  /// For steps that run like this.
  explicit Options(const schedule::StepOptions& step)
      : lookahead(step.lookahead),
        node_copy(step.node_copy),
        units_in_flight(step.units_in_flight()) {}

  /// Units in execution order that travel at the same time: their matrices should sit on different
  /// columns.
  int lookahead;
  /// Share of the makespan that may be given up so that they do; 0 keeps the best balance.
  double layout_slack = 0.03;
  /// Bytes that no owner may exceed, as `memory` counts them; 0: no limit.
  std::int64_t max_memory_bytes = 0;
  int weight_bytes = 2;    ///< of an element in the compute dtype
  int gradient_bytes = 4;  ///< of an element of gradients on the wire
  bool node_copy;          ///< with several nodes, columns keep what came from other nodes
  int units_in_flight;     ///< the most units with packed weights or gradients in memory

  bool operator==(const Options&) const = default;
};

/// @throws InvalidArgument, naming the first bad one.
void validate(const Options& options);

}  // namespace dmuon::plan
