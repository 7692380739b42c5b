#pragma once

#include <array>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "dmuon/core/by_enum.h"
#include "dmuon/simulate/execution.h"

namespace dmuon::predict {

/// A part of a training step.
enum class Phase : int { kForward, kBackward, kStep };
inline constexpr int kNumPhases = 3;
inline constexpr core::EachOf<Phase, kNumPhases> kPhases;
template <typename T>
using PerPhase = core::ByEnum<Phase, T, kNumPhases>;

/// A wait for what FSDP2 moves beside the engine counts as kOutside. Another wait counts, time by
/// time, for what its critical path goes through: messages inside a node or between nodes, updates
/// (with their messages inside a slot), or modules of peers.
enum class Cause : int { kOutside, kIntra, kInter, kUpdate, kPeers };
inline constexpr int kNumCauses = 5;
inline constexpr core::EachOf<Cause, kNumCauses> kCauses;
template <typename T>
using PerCause = core::ByEnum<Cause, T, kNumCauses>;

const char* name_of(Phase phase);
const char* name_of(Cause cause);

/// Microseconds of one rank in one step, by phase.
struct RankStep {
  PerPhase<double> elapsed_us{};
  PerPhase<PerCause<double>> waits_us{};
  double routes_in_step_us = 0;  ///< waits of the step for gradients of its backward
  PerPhase<schedule::PerLane<double>> busy_us{};    ///< compute: of modules
  PerPhase<schedule::PerLane<double>> beside_us{};  ///< busy while modules compute
  /// Waits for messages while no update runs, after other work has held up modules. Such a wait is
  /// the shorter, the later the modules come to it. The update holds them up, and on CPUs messages
  /// inside the node do.
  PerPhase<double> slack_us{};
  double messages_us = 0;  ///< in which a lane has messages, but for those that FSDP2 moves
  double awaited_us = 0;   ///< of these, in which compute waits for weights or gradients of units
};

/// Says what else a rank does beside the engine.
struct Surroundings {
  bool on_cpu = false;  ///< messages inside the node take the processors of modules
  /// The end of a module's compute in which the host waits for FSDP2; null: 0.
  std::function<double(const simulate::Issue&)> blocked_us{};
  std::optional<core::UnitIndex> fsdp2_unit{};  ///< whose messages are FSDP2's
};

/// A part of a wait.
struct Awaited {
  Cause cause;
  double begin_us;
  double end_us;
};

/// Splits the wait of compute for a span's operation into ascending parts.
using CausesOf = std::function<std::vector<Awaited>(const simulate::SimulatedSpan&)>;

/// Returns a function that splits waits of `rank` by their critical paths. It keeps references to
/// `programs` and `execution`.
CausesOf critical_causes(const simulate::Programs& programs, const simulate::Execution& execution,
                         core::Owner rank);

/// A step's place in a program: its events are 3 * step and the two after it.
/// @param timeline   of the rank, with a step before and one after.
/// @param causes_of  is called for waits in the step, but not for those for FSDP2.
RankStep measure(const simulate::Program& program,
                 const std::vector<simulate::SimulatedSpan>& timeline, int step,
                 const Surroundings& around, const CausesOf& causes_of);

/// Microseconds by which other work on a rank's device holds up its modules in a step. The update
/// does, and on CPUs messages inside the node do too. Modules of a forward that are held up wait
/// less for weights afterwards. In a backward gradients leave later, so waits stay as long.
struct HeldUp {
  double all_us = 0;     ///< by which the step takes longer
  double update_us = 0;  ///< of this, by the update
  double spared_us = 0;  ///< of the waits
};
HeldUp held_up_in(const RankStep& step, bool on_cpu);

/// Returns the spans that begin in the step or before it, and end in it. Times count from its
/// begin.
std::vector<simulate::SimulatedSpan> spans_of(const simulate::Program& program,
                                              const std::vector<simulate::SimulatedSpan>& timeline,
                                              int step);

}  // namespace dmuon::predict
