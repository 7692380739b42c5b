#pragma once

#include <functional>

namespace dmuon::engine {

/// Messages about gradients that neither the engine nor the host framework sends. For
/// each backward outside of no_sync the engine calls both functions, once all operations of its
/// pass are issued. It does so at the end, or at the settle() after a backward that raised, or in
/// settle_step() for one that only other ranks ran. So all ranks launch messages in one order, as
/// NCCL wants it. Exceptions of the functions leave through that call.
struct OtherGradients {
  /// Issues messages; waits for no other rank.
  /// @param raised  true if the backward has. Then its gradients are lost.
  std::function<void(bool raised)> send = [](bool) {};
  std::function<void()> finish = [] {};  ///< waits for them
};

}  // namespace dmuon::engine
