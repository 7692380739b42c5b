#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "dmuon/flops/newton_schulz.h"
#include "dmuon/schedule/step_options.h"

namespace dmuon::plan {

/// The demands on a plan besides time: the options of the step that will run by it, and these.
struct PlanOptions : schedule::StepOptions {
  PlanOptions() = default;
  explicit PlanOptions(const schedule::StepOptions& step) : StepOptions(step) {}

  /// Share of the makespan that may be spent so that units that travel at the same time,
  /// `lookahead` of them in execution order, are on different columns. 0 keeps the best balance.
  double layout_slack = 0.03;
  /// Most bytes of any owner, as `memory` counts them; 0: no limit.
  std::int64_t max_memory_bytes = 0;
  /// Bytes that `memory` does not count: NCCL's buffers, and what an allocator caches and rounds.
  /// They leave less of `max_memory_bytes`.
  std::int64_t reserve_bytes = 0;
  int weight_bytes = 2;                 ///< of an element in the compute dtype
  int gradient_bytes = 4;               ///< of an element of gradients on the wire
  int ns_bytes = 2;                     ///< of an element in Newton-Schulz
  int ns_steps = flops::kDefaultSteps;  ///< of Newton-Schulz
  bool on_cpu = false;                  ///< ranks are CPUs, which gloo connects
  std::string rule = "muon";            ///< of update, as require_rule (state_bytes.h) has it

  bool operator==(const PlanOptions&) const = default;
};

/// Enough `reserve_bytes` for an accelerator: an estimate, not measured.
inline constexpr std::int64_t kAcceleratorReserveBytes = std::int64_t{2} << 30;

/// @param function  named in the error.
/// @throws InvalidArgument, naming the first bad one.
void validate(const PlanOptions& options, std::string_view function = "plan");

}  // namespace dmuon::plan
