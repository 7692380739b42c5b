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

Maker::Maker(const Layout& layout, const Batches& batches)
    : has_inter_(layout.has_inter()),
      exchanges_slices_(layout.tensor_parallel > 1),
      applies_(layout.units.size()) {
  for (const core::BatchIndex batch : batches.indices()) {
    for (const core::UnitIndex unit : batches[batch]) {
      core::require(layout.units.contains(unit), "schedule: batches: expected units below ",
                    layout.units.size(), ", got ", unit);
      std::vector<Dependency>& known = applies_[unit];
      const Dependency apply{Kind::kApply, batch};
      if (known.empty() || !(known.back() == apply)) known.push_back(apply);
    }
  }
}

std::vector<Operation> Maker::updates(const std::vector<core::BatchIndex>& batches) const {
  std::vector<Operation> operations;
  const auto add = [&](Kind kind, core::BatchIndex batch, std::vector<Dependency> after) {
    operations.push_back({.kind = kind, .subject = batch, .version = 1, .after = std::move(after)});
  };
  if (!exchanges_slices_) {
    for (const core::BatchIndex batch : batches) {
      add(Kind::kPrepare, batch, {});
      add(Kind::kOrthogonalise, batch, {{Kind::kPrepare, batch}});
      add(Kind::kApply, batch, {{Kind::kOrthogonalise, batch}});
    }
    return operations;
  }
  const auto begin = [&](std::size_t i) {
    if (i >= batches.size()) return;
    add(Kind::kPrepare, batches[i], {});
    add(Kind::kGather, batches[i], {{Kind::kPrepare, batches[i]}});
  };
  const auto end = [&](core::BatchIndex batch) {
    add(Kind::kApply, batch, {{Kind::kScatter, batch}});
  };
  begin(0);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    begin(i + 1);
    add(Kind::kOrthogonalise, batches[i], {{Kind::kGather, batches[i]}});
    add(Kind::kScatter, batches[i], {{Kind::kOrthogonalise, batches[i]}});
    if (i > 0) end(batches[i - 1]);
  }
  if (!batches.empty()) end(batches.back());
  return operations;
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
