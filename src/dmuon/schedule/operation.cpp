#include "dmuon/schedule/operation.h"

#include "dmuon/core/error.h"

namespace dmuon::schedule {

const char* name_of(Kind kind) {
  static constexpr PerKind<const char*> kNames{
      "prepare",       "gather",        "orthogonalise",      "scatter",           "apply",
      "finish update", "publish inter", "publish intra",      "await weights",     "reshard",
      "route intra",   "route inter",   "finish route intra", "finish route inter"};
  return kNames[kind];
}

const char* name_of(Lane lane) {
  static constexpr PerLane<const char*> kNames{"intra", "inter", "slices", "update", "compute"};
  return kNames[lane];
}

Lane lane_of(Kind kind) {
  switch (kind) {
    case Kind::kPublishInter:
    case Kind::kRouteInter:
      return Lane::kInter;
    case Kind::kPublishIntra:
    case Kind::kRouteIntra:
      return Lane::kIntra;
    case Kind::kGather:
    case Kind::kScatter:
      return Lane::kSlices;
    case Kind::kPrepare:
    case Kind::kOrthogonalise:
    case Kind::kApply:
      return Lane::kUpdate;
    case Kind::kFinishUpdate:
    case Kind::kAwaitWeights:
    case Kind::kReshard:
    case Kind::kFinishRouteIntra:
    case Kind::kFinishRouteInter:
      break;
  }
  return Lane::kCompute;
}

std::string describe(const Subject& subject) {
  if (const auto* unit = std::get_if<core::UnitIndex>(&subject))
    return core::message("unit ", *unit);
  return core::message("batch ", std::get<core::BatchIndex>(subject));
}

std::string describe(Kind kind, const Subject& subject) {
  return name_of(kind) + (" of " + describe(subject));
}

std::vector<Message> messages_of(const Operation& operation, const Layout& layout,
                                 core::Slot slot) {
  std::vector<Message> messages;
  const Lane lane = lane_of(operation.kind);
  if (!carries_messages(lane)) return messages;
  const layout::Axis axis = axis_of(lane);
  if (layout.size(axis) == 1) return messages;
  const UnitLayout& unit = layout.units.at(operation.unit());
  const int size = is_publication(operation.kind) ? unit.weight_size : unit.gradient_size;
  for (int member = 0; member < layout.size(axis); ++member) {
    const core::Slot root = layout.slot_of(slot, axis, member);
    const std::int64_t elements =
        axis == layout::Axis::kColumn
            ? unit.owner_elements.at(root)
            : layout.column_elements(unit, layout.shard_of(root)) - unit.kept_elements;
    if (elements > 0) messages.push_back({axis, member, elements * size});
  }
  return messages;
}

}  // namespace dmuon::schedule
