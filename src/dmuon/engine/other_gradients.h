#pragma once

#include <functional>
#include <set>

namespace dmuon::engine {

/// Messages about gradients that neither the engine nor the host framework sends. For
/// each backward outside of no_sync the engine calls `average`, once all operations of its pass are
/// issued. It does so at the end, or at the settle() after a backward that raised, or in
/// settle_step() for one that only other ranks ran. So all ranks launch messages in one order, as
/// NCCL wants it. Exceptions of the functions leave through the call that led to them.
struct OtherGradients {
  /// Issues messages that have a place between the operations of the pass.
  /// @param num_crossed  triggers that the pass has crossed.
  std::function<void(int num_crossed)> send_early = [](int) {};
  /// Issues all others, and waits for all.
  /// @param raised  true if the backward has. Then its gradients are lost.
  std::function<void(bool raised)> average = [](bool) {};
  /// The engine calls `send_early` at these values of num_crossed. Set alike on all ranks, between
  /// backwards.
  std::set<int> places = {};
};

}  // namespace dmuon::engine
