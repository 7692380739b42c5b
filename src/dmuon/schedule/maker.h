#pragma once

#include <vector>

#include "dmuon/schedule/step_schedule.h"

// What the builders of passes and of updates share; not for users of the schedule.
namespace dmuon::schedule {

std::vector<int> units_by_first_use(const Trace& trace);

/// How far ahead things go, from the options, the mesh and the memory that the options grant.
struct Window {
  int inter;   // uses that stage 1 goes ahead
  int intra;   // uses that stage 2 goes ahead
  int routes;  // in flight while another unit is in its backward
};

Window window_of(const Layout& layout, const Options& options);

/// The operations that make operations of a mesh: what a stage that the mesh lacks leaves out.
class Maker {
 public:
  explicit Maker(const Layout& layout) : has_inter_(layout.num_replicates > 1) {}

  bool has_inter() const { return has_inter_; }

  Operation publish_inter(int unit) const { return {Kind::kPublishInter, unit, 0, {}}; }
  Operation publish_intra(int unit) const {
    Operation operation{Kind::kPublishIntra, unit, 0, {}};
    if (has_inter_) operation.after.push_back({Kind::kPublishInter, unit});
    return operation;
  }
  Operation await_weights(int unit) const {
    return {Kind::kAwaitWeights, unit, 0, {{Kind::kPublishIntra, unit}}};
  }
  // A buffer that nobody awaited may still be on its way.
  Operation reshard(int unit) const {
    Operation operation{Kind::kReshard, unit, 0, {{Kind::kPublishIntra, unit}}};
    if (has_inter_) operation.after.push_back({Kind::kPublishInter, unit});
    return operation;
  }
  std::vector<Operation> route(int unit, bool sync) const {
    std::vector<Operation> operations{{Kind::kRouteIntra, unit, 0, {}}};
    if (has_inter_ && sync)
      operations.push_back({Kind::kRouteInter, unit, 0, {{Kind::kRouteIntra, unit}}});
    return operations;
  }
  Operation finish_route(int unit, bool sync) const {
    return {Kind::kFinishRoute,
            unit,
            0,
            {{has_inter_ && sync ? Kind::kRouteInter : Kind::kRouteIntra, unit}}};
  }

 private:
  bool has_inter_;
};

/// @throws InvalidArgument if the trace names a unit that the layout lacks.
void check_units(const Layout& layout, const Trace& trace);

}  // namespace dmuon::schedule
