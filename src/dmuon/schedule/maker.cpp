#include "dmuon/schedule/maker.h"

#include <algorithm>

#include "dmuon/core/error.h"

namespace dmuon::schedule {

std::vector<core::UnitIndex> units_by_first_use(const Layout& layout, const Trace& trace) {
  std::vector<core::UnitIndex> units;
  for (const Trigger& trigger : trace) {
    const bool known = std::find(units.begin(), units.end(), trigger.unit) != units.end();
    if (trigger.moment == Moment::kBeforeUse && !known && !layout.units[trigger.unit].empty())
      units.push_back(trigger.unit);
  }
  return units;
}

void check_units(const Layout& layout, const Trace& trace) {
  for (const Trigger& trigger : trace) {
    core::require(layout.units.contains(trigger.unit),
                  "build_step_schedule: trace: expected units below ", layout.units.size(),
                  ", got ", trigger.unit);
  }
}

Maker::Maker(const Layout& layout, const Batches& batches)
    : has_inter_(layout.has_inter()), applies_(layout.units.size()) {
  for (const core::BatchIndex batch : batches.indices()) {
    for (const core::UnitIndex unit : batches[batch]) {
      core::require(layout.units.contains(unit), "build_step_schedule: batches: expected units ",
                    "below ", layout.units.size(), ", got ", unit);
      std::vector<Dependency>& known = applies_[unit];
      const Dependency apply{Kind::kApply, batch};
      if (known.empty() || !(known.back() == apply)) known.push_back(apply);
    }
  }
}

std::vector<Operation> Maker::update(core::BatchIndex batch) {
  return {{.kind = Kind::kPrepare, .subject = batch, .version = 1},
          {.kind = Kind::kOrthogonalise,
           .subject = batch,
           .version = 1,
           .after = {{Kind::kPrepare, batch}}},
          {.kind = Kind::kApply,
           .subject = batch,
           .version = 1,
           .after = {{Kind::kOrthogonalise, batch}}}};
}

std::vector<Operation> Maker::route(core::UnitIndex unit, bool sync) const {
  std::vector<Operation> operations{
      {.kind = Kind::kRouteIntra, .subject = unit, .hold = has_inter_ && !sync}};
  if (has_inter_ && sync) {
    operations.push_back(
        {.kind = Kind::kRouteInter, .subject = unit, .after = {{Kind::kRouteIntra, unit}}});
  }
  return operations;
}

}  // namespace dmuon::schedule
