#include "dmuon/layout/packing.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/layout/packed_size.h"

namespace dmuon::layout {
namespace {

// Padding is at most this share of a unit's leaves.
constexpr std::int64_t kPaddingShare = 8;

using core::LeafIndex;
using core::ParameterIndex;
using core::Shard;
using core::Slot;

std::vector<LeafIndex> sorted_leaves(const Parameters& parameters, const Leaves& leaves,
                                     core::UnitIndex unit, const Mesh& mesh) {
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
    return divided ? std::tuple(Shard(mesh.num_shards), core::Replicate(0), leaf)
                   : std::tuple(mesh.shard_of(owner), mesh.replicate_of(owner), leaf);
  };
  std::sort(sorted.begin(), sorted.end(),
            [&](LeafIndex a, LeafIndex b) { return key(a) < key(b); });
  return sorted;
}

// True if parts as long as the longest one are hardly more than all of them together.
template <typename Sizes>
bool near_equal(const Sizes& sizes) {
  const auto [least, most] = std::ranges::minmax(sizes);
  const auto sum = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  return least > 0 && most * sizes.size() - sum <= sum / kPaddingShare;
}

// Returns the elements to leave free behind each of the sorted leaves, so that all owners have
// equal parts, or, if these differ too much, all columns; else none.
std::vector<std::int64_t> gaps_for_equal_parts(const Parameters& parameters, const Leaves& leaves,
                                               const std::vector<LeafIndex>& sorted,
                                               const Mesh& mesh) {
  core::Vector<Slot, std::int64_t> owners(mesh.num_slots());
  core::Vector<Shard, std::int64_t> columns(mesh.num_shards);
  std::vector<Slot> owner_of;
  for (const LeafIndex leaf : sorted) {
    const Slot owner = parameters[leaves[leaf].parameters[0]].owner;
    std::int64_t elements = 0;
    for (const ParameterIndex part : leaves[leaf].parameters) {
      if (parameters[part].owner != owner || parameters[part].column) return {};
      elements += parameters[part].num_elements();
    }
    owner_of.push_back(owner);
    owners[owner] += packed_elements(elements);
    columns[mesh.shard_of(owner)] += packed_elements(elements);
  }
  const bool of_owners = near_equal(owners);
  if (!of_owners && !near_equal(columns)) return {};
  std::vector<std::int64_t> gaps(sorted.size());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const Shard column = mesh.shard_of(owner_of[i]);
    const bool is_last = i + 1 == sorted.size();
    if (of_owners && (is_last || owner_of[i + 1] != owner_of[i]))
      gaps[i] = std::ranges::max(owners) - owners[owner_of[i]];
    if (!of_owners && (is_last || mesh.shard_of(owner_of[i + 1]) != column))
      gaps[i] = std::ranges::max(columns) - columns[column];
  }
  return gaps;
}

// Gives each parameter its elements in the unit's buffers. Returns, for each, where the elements
// end that travel with it.
core::Vector<PackedIndex, std::int64_t> place_parameters(const Parameters& parameters,
                                                         const Leaves& leaves,
                                                         const std::vector<LeafIndex>& sorted,
                                                         const std::vector<std::int64_t>& gaps,
                                                         Packing* packing) {
  core::Vector<PackedIndex, std::int64_t> ends;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const LeafIndex leaf = sorted[i];
    const std::int64_t first = packing->num_elements;
    const auto aligned = [&](std::int64_t end) { return first + packed_elements(end - first); };
    std::int64_t end = first;
    std::optional<Shard> column;
    for (const ParameterIndex index : leaves[leaf].parameters) {
      const OwnedParameter& parameter = parameters[index];
      if (parameter.column != column && end > first) {  // each column's part begins at `first`
        ends.back() = aligned(end);
        end = first;
      }
      column = parameter.column;
      const std::int64_t begin = std::exchange(end, end + parameter.num_elements());
      packing->parameters.push_back({.index = index,
                                     .leaf = PackedLeafIndex(packing->leaves.size()),
                                     .is_kept = column.has_value(),
                                     .in_unit = {begin, end},
                                     .column = {},
                                     .in_column = {}});
      ends.push_back(end);
    }
    packing->leaves.push_back({leaf, first});
    packing->num_elements = ends.back() = aligned(end) + (gaps.empty() ? 0 : gaps[i]);
  }
  return ends;
}

// Gives columns and owners their parts: of the parameters that travel inside the node, or of the
// kept ones.
void place_parts(const Parameters& parameters, const Mesh& mesh,
                 const core::Vector<PackedIndex, std::int64_t>& ends, bool kept, Packing* packing) {
  for (const Slot slot : mesh.slots()) {
    const Shard column = mesh.shard_of(slot);
    Part& all = kept ? packing->kept[column] : packing->columns[column];
    for (const PackedIndex place : packing->parameters.indices()) {
      PackedParameter& packed = packing->parameters[place];
      if (parameters[packed.index].owner != slot || packed.is_kept != kept) continue;
      const std::int64_t begin = packing->column_elements(column);
      packed.column = column;
      packed.in_column = {begin, begin + packed.in_unit.size()};
      const Segment travels{packed.in_unit.begin, ends[place]};
      all.append(travels);
      packing->owners[slot].append(travels);
      if (kept) packing->kept_by[slot] += travels.size();
    }
  }
}

std::int64_t num_elements_of(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

}  // namespace

Leaves leaves_of(const Parameters& parameters, const LeafSizes& sizes) {
  Leaves leaves;
  core::Vector<LeafIndex, std::int64_t> num_elements;
  for (const ParameterIndex index : parameters.indices()) {
    const OwnedParameter& parameter = parameters[index];
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
    const std::int64_t got = num_elements_of(leaves[leaf].sizes);
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

Segment overlap(const Segment& a, const Segment& b) {
  const Segment both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.end > both.begin ? both : Segment{};
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

bool equal_parts(const std::vector<Part>& parts, std::int64_t num_elements) {
  const auto count = static_cast<std::int64_t>(parts.size());
  const std::int64_t length = num_elements / count;
  if (length == 0 || num_elements % count != 0) return false;
  for (std::int64_t g = 0; g < count; ++g) {
    const std::vector<Segment>& segments = parts[static_cast<std::size_t>(g)].segments;
    if (segments.size() != 1 || segments[0] != Segment{g * length, (g + 1) * length}) return false;
  }
  return true;
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

PackedLeafIndex Packing::place_of(LeafIndex leaf) const {
  const auto found = std::ranges::find(leaves, leaf, &PackedLeaf::index);
  core::invariant(found != leaves.end(),
                  "Packing::place_of: leaf: expected one of the unit's, got ", leaf);
  return PackedLeafIndex(found - leaves.begin());
}

Packing pack(const Parameters& parameters, const Leaves& leaves, core::UnitIndex unit,
             const Mesh& mesh, bool pads) {
  Packing packing;
  packing.columns.resize(mesh.num_shards);
  packing.kept.resize(mesh.num_shards);
  packing.owners.resize(mesh.num_slots());
  packing.kept_by.resize(mesh.num_slots());
  const std::vector<LeafIndex> sorted = sorted_leaves(parameters, leaves, unit, mesh);
  std::vector<std::int64_t> gaps;
  if (pads) gaps = gaps_for_equal_parts(parameters, leaves, sorted, mesh);
  const core::Vector<PackedIndex, std::int64_t> ends =
      place_parameters(parameters, leaves, sorted, gaps, &packing);
  for (const bool kept : {false, true}) place_parts(parameters, mesh, ends, kept, &packing);
  return packing;
}

}  // namespace dmuon::layout
