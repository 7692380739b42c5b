#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dmuon/predict/setting.h"
#include "dmuon/predict/timeline.h"

// Predicts a training step, from the schedule that the engine runs and the rates of devices and
// links. A step is taken from the middle of several, so that what one leaves to the next counts.
namespace dmuon::predict {

enum class Contender : int {
  kAdamW,   ///< FSDP2 or HSDP with fused AdamW, see baseline.h
  kDmuon,   ///< this engine
  kMuonAg,  ///< Muon whose ranks gather every matrix and orthogonalise all of them, likewise
};
inline constexpr int kNumContenders = 3;
inline constexpr core::EachOf<Contender, kNumContenders> kContenders;

const char* name_of(Contender contender);

/// An operation of the first rank in the step.
struct Span {
  std::string lane;
  /// "forward", "backward", or an operation's. At the step's end come "held up" for beside_ms,
  /// "adamw" and, on CPUs, "host": parts of the step that no lane has.
  std::string kind;
  int unit = 0;    ///< 0: the parameters that Muon does not take; -1: it is on none
  int batch = -1;  ///< of the rank; -1: it is on none
  double issued_ms = 0;
  double start_ms = 0;  ///< when all that it waits for was done
  double end_ms = 0;
};

/// Milliseconds of one step, means over ranks unless said otherwise.
struct Prediction {
  double step_ms = 0;            ///< of the three phases and of what is below
  PerPhase<double> phases_ms{};  ///< as far as lanes of a rank do not slow each other down
  double adamw_ms = 0;           ///< AdamW of all, or of what Muon does not take
  /// The time by which other work holds up modules of the same device, on the rank with most of it:
  /// the update does; on CPUs also messages inside the node.
  double beside_ms = 0;
  /// The time that the step is longer for its optimizer: the third phase without waits for
  /// gradients, AdamW, and updates of any rank that hold up later work, or that it waits for.
  double optimizer_ms = 0;
  double update_ms = 0;  ///< Newton-Schulz and what is around it, of the slowest rank
  PerPhase<PerCause<double>> waits_ms{};
  schedule::PerLane<double> busy_ms{};  ///< with waits for members, and for others on one adapter
  double intra_bytes = 0;   ///< that the busiest device receives from, or sends to, its node
  double inter_bytes = 0;   ///< likewise, other nodes
  double memory_bytes = 0;  ///< of parameters, gradients, state and buffers: the fullest rank
  /// CPU time of hooks and launches. On accelerators a step takes no less, on CPUs it comes on top.
  double host_ms = 0;
  PerPhase<double> begins_ms{};  ///< of the first rank's phases
  std::vector<Span> spans;       ///< of the first rank, as they end

  /// The share of the time that a lane has messages in which compute does not wait, as a profile
  /// counts it. In kDmuon's step FSDP2's messages and waits for these do not count; the baselines
  /// have no others. 1 without messages.
  double hidden = 1;
};

/// @throws InvalidArgument as validate() says.
Prediction predict(const Setting& setting, Contender contender);

}  // namespace dmuon::predict
