#pragma once

#include <vector>

#include "dmuon/schedule/step_schedule.h"

// Shared by the builders of passes and of updates, and by the resolver.
namespace dmuon::schedule {

/// Units in order of first use. Skips empty units.
std::vector<core::UnitIndex> units_by_first_use(const Layout& layout, const Trace& trace);

/// Prefetch distances, derived from the options, the mesh and the memory that the options grant.
struct Window {
  int inter;                  // uses that stage 1 goes ahead
  int intra;                  // uses that stage 2 goes ahead
  int route_stage_1;          // routes whose gradients travel while another unit is in its backward
  int always_in_stage_2;      // routes that may be in stage 2, however large their nodes' means are
  double most_stage_2_bytes;  // of the means and inboxes of more routes, in any column
};

Window window_of(const Layout& layout, const StepOptions& options);

/// Builds operations, with what each must wait for. Omits the stages that a single node does not
/// need. A publication that reads masters waits for the batches that touch its unit. Immutable, so
/// threads may share it.
///
///     const Maker make(layout, batches);
///     if (make.has_inter()) issue(make.publish_inter(unit));
///     issue(make.publish_intra(unit));
class Maker {
 public:
  /// @param batches  of this rank.
  /// @throws InvalidArgument if a batch names a unit that the layout lacks.
  Maker(const Layout& layout, const Batches& batches);

  bool has_inter() const { return has_inter_; }

  /// Builds the update of batches, in this order: prepare, orthogonalise and apply of each. With
  /// tensor parallelism also the exchange of each. Then the next batch's gather and the last one's
  /// scatter travel while a batch is orthogonalised.
  std::vector<Operation> updates(const std::vector<core::BatchIndex>& batches) const;
  static Operation finish_update(core::BatchIndex batch) {
    return {.kind = Kind::kFinishUpdate, .subject = batch, .after = {{Kind::kApply, batch}}};
  }

  Operation publish_inter(core::UnitIndex unit) const {
    return {.kind = Kind::kPublishInter, .subject = unit, .after = applies_[unit]};
  }
  Operation publish_intra(core::UnitIndex unit) const {
    if (!has_inter_) return {.kind = Kind::kPublishIntra, .subject = unit, .after = applies_[unit]};
    return {.kind = Kind::kPublishIntra, .subject = unit, .after = {{Kind::kPublishInter, unit}}};
  }
  Operation await_weights(core::UnitIndex unit) const {
    return {.kind = Kind::kAwaitWeights, .subject = unit, .after = {{Kind::kPublishIntra, unit}}};
  }
  // A buffer that nobody awaited may still be on its way.
  Operation reshard(core::UnitIndex unit) const {
    Operation operation{
        .kind = Kind::kReshard, .subject = unit, .after = {{Kind::kPublishIntra, unit}}};
    if (has_inter_) operation.after.push_back({Kind::kPublishInter, unit});
    return operation;
  }
  std::vector<Operation> route(core::UnitIndex unit, bool sync) const;
  Operation finish_route_intra(core::UnitIndex unit) const {
    return {.kind = Kind::kFinishRouteIntra, .subject = unit, .after = {{Kind::kRouteIntra, unit}}};
  }
  Operation finish_route_inter(core::UnitIndex unit) const {
    return {.kind = Kind::kFinishRouteInter, .subject = unit, .after = {{Kind::kRouteInter, unit}}};
  }

 private:
  bool has_inter_;
  bool exchanges_slices_;
  core::Vector<core::UnitIndex, std::vector<Dependency>> applies_;  // of the batches that touch it
};

}  // namespace dmuon::schedule
