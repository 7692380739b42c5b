#include "dmuon/engine/packing.h"

#include <algorithm>
#include <tuple>

#include "dmuon/core/error.h"
#include "dmuon/plan/packed_size.h"

namespace dmuon::engine {

using core::ParameterIndex;
using core::Shard;
using core::Slot;

std::vector<Segment> Packing::parts_of(Shard column) const {
  const std::int64_t origin = columns[column].begin;
  std::vector<Segment> parts;
  for (int slot = column.value(); slot < owners.size(); slot += columns.size()) {
    const Segment& part = owners[Slot(slot)];
    parts.push_back({part.begin - origin, part.end - origin});
  }
  return parts;
}

PackedIndex Packing::place_of(ParameterIndex parameter) const {
  const auto found = std::find(parameters.begin(), parameters.end(), parameter);
  core::invariant(found != parameters.end(), "Packing::place_of: parameter: expected one of the ",
                  "unit's, got ", parameter);
  return PackedIndex(found - parameters.begin());
}

Packing pack(const Parameters& parameters, core::UnitIndex unit, int num_replicates,
             int num_shards) {
  std::vector<ParameterIndex> sorted;
  for (const ParameterIndex parameter : parameters.indices()) {
    if (parameters[parameter].unit == unit) sorted.push_back(parameter);
  }
  const auto key = [&](ParameterIndex parameter) {
    const int owner = parameters[parameter].owner.value();
    return std::tuple(owner % num_shards, owner / num_shards, parameter);
  };
  std::sort(sorted.begin(), sorted.end(),
            [&](ParameterIndex a, ParameterIndex b) { return key(a) < key(b); });

  Packing packing;
  packing.owners.resize(num_shards * num_replicates);
  auto next = sorted.begin();
  std::int64_t offset = 0;
  for (int column = 0; column < num_shards; ++column) {
    Segment& segment = packing.columns[packing.columns.push_back({offset, offset})];
    for (int replicate = 0; replicate < num_replicates; ++replicate) {
      const Slot slot(replicate * num_shards + column);
      packing.owners[slot].begin = offset;
      for (; next != sorted.end() && parameters[*next].owner == slot; ++next) {
        const std::int64_t size = parameters[*next].num_elements();
        packing.segments.push_back({offset, offset + size});
        offset += plan::packed_elements(size);
      }
      packing.owners[slot].end = offset;
    }
    segment.end = offset;
  }
  packing.parameters = core::Vector<PackedIndex, ParameterIndex>(std::move(sorted));
  packing.num_elements = offset;
  return packing;
}

}  // namespace dmuon::engine
