#include "dmuon/schedule/operation.h"

namespace dmuon::schedule {

const char* name_of(Kind kind) {
  static constexpr const char* kNames[kNumKinds] = {
      "update",      "publish inter",      "publish intra",     "await weights",
      "forward",     "backward",           "reshard",           "route intra",
      "route inter", "finish route intra", "finish route inter"};
  return kNames[static_cast<int>(kind)];
}

const char* name_of(Lane lane) {
  static constexpr const char* kNames[kNumLanes] = {"intra", "inter", "compute"};
  return kNames[static_cast<int>(lane)];
}

Lane lane_of(Kind kind) {
  if (kind == Kind::kPublishInter || kind == Kind::kRouteInter) return Lane::kInter;
  if (kind == Kind::kPublishIntra || kind == Kind::kRouteIntra) return Lane::kIntra;
  return Lane::kCompute;
}

std::vector<Message> messages_of(const Operation& operation, const Layout& layout,
                                 core::Slot slot) {
  std::vector<Message> messages;
  const Lane lane = lane_of(operation.kind);
  if (lane == Lane::kCompute) return messages;
  const layout::Axis axis = lane == Lane::kInter ? layout::Axis::kColumn : layout::Axis::kRow;
  if (layout.size(axis) == 1) return messages;
  const UnitLayout& unit = layout.units.at(operation.unit);
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
