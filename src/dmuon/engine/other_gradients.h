#pragma once

#include <functional>

namespace dmuon::engine {

/// Messages about gradients that neither the engine nor the host framework sends. The engine calls
/// both functions once for each backward outside of no_sync, once all operations of its pass are
/// issued: at its end, at the settle() after one that raised, and in settle_step() for one that
/// only other ranks ran. So all ranks launch messages in one order, as NCCL wants it. What the
/// functions throw leaves through that call.
struct OtherGradients {
  /// Issues messages; waits for no other rank.
  /// @param raised  true if the backward has. Then its gradients are lost.
  std::function<void(bool raised)> send = [](bool) {};
  std::function<void()> finish = [] {};  ///< waits for them
};

}  // namespace dmuon::engine
