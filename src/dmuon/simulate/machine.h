#pragma once

#include "dmuon/simulate/dry_run.h"
#include "dmuon/simulate/rank_analysis.h"

namespace dmuon::simulate {

/// Runs all programs in virtual time, lanes and messages as schedule::Operation says, and appends
/// to `run` what is wrong with messages, progress and data, and the timeline.
///
/// Ranks are taken in turn; each goes on until all its lanes wait. This is no order of events: a
/// span's times are the longest path that leads to it.
void execute(const Programs& programs, const core::Vector<core::Slot, RankAnalysis>& analyses,
             bool node_copy, const Delays& delays, DryRun* run);

}  // namespace dmuon::simulate
