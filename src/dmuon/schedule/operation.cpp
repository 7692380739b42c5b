#include "dmuon/schedule/operation.h"

#include <algorithm>
#include <numeric>

namespace dmuon::schedule {

const char* name_of(Kind kind) {
  static constexpr const char* kNames[kNumKinds] = {
      "update",      "publish inter",      "publish intra",     "await weights",
      "forward",     "backward",           "reshard",           "route intra",
      "route inter", "finish route intra", "finish route inter"};
  return kNames[static_cast<int>(kind)];
}

const char* name_of(Lane lane) {
  static constexpr const char* kNames[kNumLanes] = {"compute", "intra", "inter"};
  return kNames[static_cast<int>(lane)];
}

Lane lane_of(Kind kind) {
  if (kind == Kind::kPublishInter || kind == Kind::kRouteInter) return Lane::kInter;
  if (kind == Kind::kPublishIntra || kind == Kind::kRouteIntra) return Lane::kIntra;
  return Lane::kCompute;
}

std::int64_t UnitLayout::num_elements() const {
  return std::accumulate(owner_elements.begin(), owner_elements.end(), std::int64_t{0});
}

std::int64_t Layout::largest_buffer(int UnitLayout::*element_size) const {
  std::int64_t largest = 0;
  for (const UnitLayout& unit : units)
    largest = std::max(largest, buffer_elements(unit) * unit.*element_size);
  return largest;
}

std::int64_t Layout::largest_node_mean() const {
  std::int64_t largest = 0;
  for (const UnitLayout& unit : units) {
    core::Vector<core::Shard, std::int64_t> columns(num_shards);
    for (const core::Slot slot : unit.owner_elements.indices())
      columns[shard_of(slot)] += unit.owner_elements[slot] * unit.gradient_size;
    for (const std::int64_t column : columns) largest = std::max(largest, column);
  }
  return largest;
}

std::vector<Message> messages_of(const Operation& operation, const Layout& layout,
                                 core::Slot slot) {
  std::vector<Message> messages;
  const Lane lane = lane_of(operation.kind);
  if (lane == Lane::kCompute) return messages;
  const UnitLayout& unit = layout.units.at(operation.unit);
  const int size = is_publication(operation.kind) ? unit.weight_size : unit.gradient_size;
  const core::Indices<core::Replicate> replicates(layout.num_replicates);
  const auto part = [&](core::Replicate replicate, core::Shard shard) {
    return unit.owner_elements.at(layout.slot_of(replicate, shard));
  };
  const auto add = [&](Message::Group group, int root, std::int64_t elements) {
    if (elements > 0) messages.push_back({group, root, elements * size});
  };
  if (lane == Lane::kInter) {
    if (!layout.has_inter()) return messages;
    for (const core::Replicate replicate : replicates)
      add(Message::Group::kColumn, replicate.value(), part(replicate, layout.shard_of(slot)));
    return messages;
  }
  if (layout.num_shards == 1) return messages;
  for (const core::Shard shard : core::Indices<core::Shard>(layout.num_shards)) {
    std::int64_t elements = -unit.kept_elements;
    for (const core::Replicate replicate : replicates) elements += part(replicate, shard);
    add(Message::Group::kRow, shard.value(), elements);
  }
  return messages;
}

}  // namespace dmuon::schedule
