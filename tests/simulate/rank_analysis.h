#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/simulate/execution.h"

namespace dmuon::simulate {

/// What can be said of one rank's program without running it.
struct RankAnalysis {
  std::vector<Frontier> after;  ///< [issues] everything that is done before it starts, whatever
                                ///< the delays: what it waits on, what that waits on, ...
  std::int64_t peak_bytes = 0;  ///< packed weights and gradients, nodes' means, inboxes

  /// Whether `first` is done before `second` starts, whatever the delays.
  bool is_ordered(const Program& program, int first, int second) const;
};

/// Follows the state of the rank's buffers in the order of issue, which is how the operations are
/// meant, and proves that lanes cannot change it: of any two operations that use a buffer, one of
/// them changing it, the later waits for the earlier. A frontier takes the place of a vector clock
/// (Lamport 1978), so nothing here depends on delays or on other ranks.
///
/// Also reported: a buffer that is read while it is free or filled while it is full, a node copy
/// that is sent twice or is of another version than the one to be published, a route that is
/// finished, continued or begun twice out of turn, a dependency that names nothing issued, or a
/// route of an earlier backward.
///
/// @param rank        names the rank in violations.
/// @param violations  sentences are appended.
RankAnalysis analyze(const Program& program, core::Owner rank, bool node_copy,
                     std::vector<std::string>* violations);

}  // namespace dmuon::simulate
