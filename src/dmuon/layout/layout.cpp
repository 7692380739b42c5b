#include "dmuon/layout/layout.h"

#include <algorithm>
#include <numeric>

namespace dmuon::layout {

std::int64_t UnitLayout::num_elements() const {
  return std::accumulate(owner_elements.begin(), owner_elements.end(), std::int64_t{0});
}

UnitLayout unit_layout(const Packing& packing) {
  UnitLayout unit;
  for (const Part& part : packing.owners) unit.owner_elements.push_back(part.size());
  unit.kept_elements = packing.kept.front().size();  // equal in all columns
  return unit;
}

std::int64_t Layout::column_elements(const UnitLayout& unit, core::Shard column) const {
  std::int64_t elements = 0;
  for (const core::Replicate replicate : replicates())
    elements += unit.owner_elements[slot_at(replicate, column)];
  return elements;
}

std::int64_t Layout::largest_buffer(int UnitLayout::*element_size) const {
  std::int64_t largest = 0;
  for (const UnitLayout& unit : units)
    largest = std::max(largest, buffer_elements(unit) * unit.*element_size);
  return largest;
}

}  // namespace dmuon::layout
