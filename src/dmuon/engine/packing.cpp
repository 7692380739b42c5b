#include "dmuon/engine/packing.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/plan/packed_size.h"

namespace dmuon::engine {
namespace {

using core::LeafIndex;
using core::ParameterIndex;
using core::Shard;
using core::Slot;

std::vector<LeafIndex> sorted_leaves(const Parameters& parameters, const Leaves& leaves,
                                     core::UnitIndex unit, int num_shards) {
  std::vector<LeafIndex> sorted;
  for (const LeafIndex leaf : leaves.indices()) {
    if (leaves[leaf].unit == unit) sorted.push_back(leaf);
  }
  const auto key = [&](LeafIndex leaf) {
    const std::vector<ParameterIndex>& parts = leaves[leaf].parameters;
    const Slot owner = parameters[parts[0]].owner;
    const bool divided = std::any_of(parts.begin(), parts.end(), [&](ParameterIndex part) {
      return parameters[part].owner != owner;
    });
    return divided ? std::tuple(num_shards, 0, leaf)
                   : std::tuple(owner.value() % num_shards, owner.value() / num_shards, leaf);
  };
  std::sort(sorted.begin(), sorted.end(),
            [&](LeafIndex a, LeafIndex b) { return key(a) < key(b); });
  return sorted;
}

// What each column and owner has of what travels inside the node, or, afterwards, of what does not;
// `ends` of what goes with each place.
void hand_out(const Parameters& parameters, const core::Vector<PackedIndex, std::int64_t>& ends,
              bool kept, Packing* packing) {
  const int num_shards = packing->columns.size();
  for (int slot = 0; slot < packing->owners.size(); ++slot) {
    const Shard column(slot % num_shards);
    Part& all = kept ? packing->kept[column] : packing->columns[column];
    for (const PackedIndex place : packing->parameters.indices()) {
      if (parameters[packing->parameters[place]].owner != Slot(slot)) continue;
      if (packing->is_kept[place] != kept) continue;
      const Segment segment = packing->segments[place];
      const std::int64_t begin = packing->column_elements(column);
      packing->column_of[place] = column;
      packing->in_column[place] = {begin, begin + segment.size()};
      all.append({segment.begin, ends[place]});
      packing->owners[Slot(slot)].append({segment.begin, ends[place]});
      if (kept) packing->kept_by[Slot(slot)] += ends[place] - segment.begin;
    }
  }
}

}  // namespace

Leaves leaves_of(const Parameters& parameters, const LeafSizes& sizes) {
  Leaves leaves;
  core::Vector<LeafIndex, std::int64_t> num_elements;
  for (const ParameterIndex index : parameters.indices()) {
    const Parameter& parameter = parameters[index];
    if (!parameter.continues) {
      leaves.push_back({parameter.unit_index(), {}, parameter.view.sizes()});
      num_elements.push_back(0);
    }
    core::invariant(!leaves.empty() && leaves.back().unit == parameter.unit_index(),
                    "leaves_of: parameter ", index, " continues none of its unit");
    leaves.back().parameters.push_back(index);
    if (parameter.column) leaves.back().num_columns = parameter.column->value() + 1;
    num_elements.back() += parameter.num_elements();
  }
  core::invariant(sizes.empty() || sizes.size() == leaves.size(), "leaves_of: sizes: expected ",
                  leaves.size(), ", got ", sizes.size());
  for (const LeafIndex leaf : leaves.indices()) {
    if (leaves[leaf].parameters.size() > 1) leaves[leaf].sizes = {num_elements[leaf]};
    if (!sizes.empty()) leaves[leaf].sizes = sizes[leaf];
    const std::int64_t got = c10::multiply_integers(leaves[leaf].sizes);
    core::invariant(got == num_elements[leaf], "leaves_of: sizes: expected the ",
                    num_elements[leaf], " elements of leaf ", leaf, ", got ", got);
  }
  return leaves;
}

std::vector<std::int64_t> Leaf::local_sizes() const {
  std::vector<std::int64_t> local = sizes;
  core::invariant(local.at(0) % num_columns == 0, "Leaf: expected a first dimension for ",
                  num_columns, " columns, got ", local[0]);
  local[0] /= num_columns;
  return local;
}

std::int64_t Part::size() const {
  std::int64_t size = 0;
  for (const Segment& segment : segments) size += segment.size();
  return size;
}

std::int64_t Part::element_at(std::int64_t place) const {
  for (const Segment& segment : segments) {
    if (place < segment.size()) return segment.begin + place;
    place -= segment.size();
  }
  core::bug("Part::element_at: expected less than ", size(), ", got ", place + size());
}

void Part::append(const Segment& segment) {
  if (segment.size() == 0) return;
  if (!segments.empty() && segments.back().end == segment.begin) {
    segments.back().end = segment.end;
  } else {
    segments.push_back(segment);
  }
}

std::vector<Part> Packing::parts_of(Shard column) const {
  std::vector<Part> parts;
  std::int64_t travelling = 0;
  std::int64_t next = columns[column].size();
  for (int slot = column.value(); slot < owners.size(); slot += columns.size()) {
    const std::int64_t own = kept_by[Slot(slot)];
    const std::int64_t first = travelling;
    travelling += owners[Slot(slot)].size() - own;
    const std::int64_t begin = std::exchange(next, next + own);
    parts.emplace_back().append({first, travelling});
    parts.back().append({begin, next});
  }
  return parts;
}

std::vector<Part> Packing::owners_of(Shard column) const {
  std::vector<Part> parts;
  for (int slot = column.value(); slot < owners.size(); slot += columns.size())
    parts.push_back(owners[Slot(slot)]);
  return parts;
}

PackedIndex Packing::place_of(ParameterIndex parameter) const {
  const auto found = std::find(parameters.begin(), parameters.end(), parameter);
  core::invariant(found != parameters.end(), "Packing::place_of: parameter: expected one of the ",
                  "unit's, got ", parameter);
  return PackedIndex(found - parameters.begin());
}

PackedLeafIndex Packing::place_of(LeafIndex leaf) const {
  const auto found = std::find(leaves.begin(), leaves.end(), leaf);
  core::invariant(found != leaves.end(),
                  "Packing::place_of: leaf: expected one of the unit's, got ", leaf);
  return PackedLeafIndex(found - leaves.begin());
}

Packing pack(const Parameters& parameters, core::UnitIndex unit, int num_replicates,
             int num_shards) {
  const Leaves leaves = leaves_of(parameters);
  Packing packing;
  core::Vector<PackedIndex, std::int64_t> ends;
  for (const LeafIndex leaf : sorted_leaves(parameters, leaves, unit, num_shards)) {
    const std::int64_t first = packing.num_elements;
    const auto aligned = [&](std::int64_t end) {
      return first + plan::packed_elements(end - first);
    };
    std::int64_t end = first;
    std::optional<Shard> column;
    for (const ParameterIndex index : leaves[leaf].parameters) {
      const Parameter& parameter = parameters[index];
      if (parameter.column != column && end > first) {  // the next column's begins where this did
        ends.back() = aligned(end);
        end = first;
      }
      column = parameter.column;
      const std::int64_t begin = std::exchange(end, end + parameter.num_elements());
      packing.parameters.push_back(index);
      packing.leaf_of.push_back(PackedLeafIndex(packing.leaves.size()));
      packing.is_kept.push_back(column.has_value());
      packing.segments.push_back({begin, end});
      ends.push_back(end);
    }
    packing.leaves.push_back(leaf);
    packing.leaf_begins.push_back(first);
    packing.num_elements = ends.back() = aligned(end);
  }
  packing.column_of.resize(packing.parameters.size());
  packing.in_column.resize(packing.parameters.size());
  packing.columns.resize(num_shards);
  packing.kept.resize(num_shards);
  packing.owners.resize(num_shards * num_replicates);
  packing.kept_by.resize(num_shards * num_replicates);
  for (const bool kept : {false, true}) hand_out(parameters, ends, kept, &packing);
  return packing;
}

}  // namespace dmuon::engine
