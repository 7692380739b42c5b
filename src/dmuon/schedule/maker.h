#pragma once

#include <vector>

#include "dmuon/schedule/step_schedule.h"

// What the builders of passes and of updates share with the resolver, which has a Maker; who uses
// either needs nothing of it.
namespace dmuon::schedule {

/// Without those that are empty.
std::vector<core::UnitIndex> units_by_first_use(const Layout& layout, const Trace& trace);

/// How far ahead things go, from the options, the mesh and the memory that the options grant.
struct Window {
  int inter;          // uses that stage 1 goes ahead
  int intra;          // uses that stage 2 goes ahead
  int route_stage_1;  // routes whose gradients travel while another unit is in its backward
  int route_stage_2;  // routes whose nodes' means do; no less
};

Window window_of(const Layout& layout, const StepOptions& options);

/// The operations that make operations of a mesh: what a stage that the mesh lacks leaves out.
class Maker {
 public:
  explicit Maker(const Layout& layout) : has_inter_(layout.has_inter()) {}

  bool has_inter() const { return has_inter_; }

  Operation publish_inter(core::UnitIndex unit) const {
    return {.kind = Kind::kPublishInter, .unit = unit};
  }
  Operation publish_intra(core::UnitIndex unit) const {
    Operation operation{.kind = Kind::kPublishIntra, .unit = unit};
    if (has_inter_) operation.after.push_back({Kind::kPublishInter, unit});
    return operation;
  }
  Operation await_weights(core::UnitIndex unit) const {
    return {.kind = Kind::kAwaitWeights, .unit = unit, .after = {{Kind::kPublishIntra, unit}}};
  }
  // A buffer that nobody awaited may still be on its way.
  Operation reshard(core::UnitIndex unit) const {
    Operation operation{
        .kind = Kind::kReshard, .unit = unit, .after = {{Kind::kPublishIntra, unit}}};
    if (has_inter_) operation.after.push_back({Kind::kPublishInter, unit});
    return operation;
  }
  std::vector<Operation> route(core::UnitIndex unit, bool sync) const {
    std::vector<Operation> operations{
        {.kind = Kind::kRouteIntra, .unit = unit, .hold = has_inter_ && !sync}};
    if (has_inter_ && sync) {
      operations.push_back(
          {.kind = Kind::kRouteInter, .unit = unit, .after = {{Kind::kRouteIntra, unit}}});
    }
    return operations;
  }
  Operation finish_route_intra(core::UnitIndex unit) const {
    return {.kind = Kind::kFinishRouteIntra, .unit = unit, .after = {{Kind::kRouteIntra, unit}}};
  }
  Operation finish_route_inter(core::UnitIndex unit) const {
    return {.kind = Kind::kFinishRouteInter, .unit = unit, .after = {{Kind::kRouteInter, unit}}};
  }

 private:
  bool has_inter_;
};

/// @throws InvalidArgument if the trace names a unit that the layout lacks.
void check_units(const Layout& layout, const Trace& trace);

}  // namespace dmuon::schedule
