#pragma once

#include <optional>
#include <set>

#include "dmuon/core/index.h"

namespace dmuon::engine {

/// Knows if the sums of gradients that FSDP2 keeps under no_sync still belong together.
///
/// Between nodes FSDP2 adds what it keeps place by place, whatever parameters it is of. So
/// micro-steps of one step must use the same host units, and cleared gradients must be FSDP2's too.
/// On one node it keeps nothing. Not thread-safe.
class HostSums {
 public:
  /// @param replicated  true if several nodes have each of the host's parameters.
  explicit HostSums(bool replicated) : replicated_(replicated) {}

  /// A backward opens. @param cleared  true if the gradients of all leaves have been cleared.
  void begin_backward(bool cleared) {
    mixed_ |= held() && cleared;
    uses_.clear();
  }

  /// The open backward uses a host unit.
  void use(core::UnitIndex unit) { uses_.insert(unit); }

  /// The backward is over. @param syncs  false: FSDP2 keeps its gradients.
  void end_backward(bool syncs) {
    if (!replicated_ || uses_.empty()) return;
    mixed_ |= held_ && *held_ != uses_;
    held_.reset();
    if (!syncs) held_ = uses_;
    uses_.clear();
  }

  /// One leaf's gradient was cleared, which leaves FSDP2's sums alone.
  void clear_leaf() { mixed_ |= held(); }

  /// True if FSDP2 keeps sums that no synchronised backward has sent between nodes.
  bool held() const { return held_.has_value(); }

  /// FSDP2 has thrown its sums away.
  void forget() {
    held_.reset();
    mixed_ = false;
  }

  /// @returns true, once, if sums were added since the last call that do not belong together.
  bool take_mixed() {
    const bool mixed = mixed_;
    mixed_ = false;
    return mixed;
  }

 private:
  bool replicated_;
  std::set<core::UnitIndex> uses_;                 // of the backward that is open
  std::optional<std::set<core::UnitIndex>> held_;  // units whose gradients FSDP2 keeps
  bool mixed_ = false;
};

}  // namespace dmuon::engine
