#pragma once

#include <functional>

#include "dmuon/simulate/program.h"

namespace dmuon::simulate {

/// A job without one of its parts after the other, as long as it still fails: events, a step's
/// passes, skips, units, uses, replicates, shards, options.
/// @param fails  true for `job`.
Job shrink(Job job, const std::function<bool(const Job&)>& fails);

}  // namespace dmuon::simulate
