#include "dmuon/plan/division.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

// A part has at most this share of an owner's work. Smaller parts balance better and travel in
// more messages.
constexpr double kLargestPart = 1. / 8;

// The number that Newton-Schulz' FLOPs grow with.
double work_of(const Parameter& parameter) {
  double work = 0;
  for (const Shape& shape : parameter.shape().of_costs()) {
    work += static_cast<double>(shape.num_elements()) *
            static_cast<double>(std::min(shape.rows, shape.cols));
  }
  return work;
}

// Returns the leaf's name and its first matrix: name and a of "name[a:b]", otherwise 0.
std::pair<std::string, std::int64_t> range_of(const Parameter& part) {
  const std::size_t bracket = part.column ? part.name.rfind('[') : std::string::npos;
  if (bracket == std::string::npos) return {part.name, 0};
  const std::string_view range = std::string_view(part.name).substr(bracket + 1);
  std::int64_t begin = 0;
  std::from_chars(range.begin(), range.end(), begin);
  return {part.name.substr(0, bracket), begin};
}

// Returns the smallest divisor of the stack that makes parts light enough, or the last one before
// parts get too small.
std::int64_t num_parts(const Parameter& stack, double largest, std::int64_t smallest) {
  const std::int64_t all = stack.shape().num_elements();
  std::int64_t best = 1;
  for (std::int64_t parts = 1; parts <= stack.view.num_matrices && all / parts >= smallest;
       ++parts) {
    if (stack.view.num_matrices % parts != 0) continue;
    best = parts;
    if (work_of(stack) <= largest * static_cast<double>(parts)) break;
  }
  return best;
}

}  // namespace

Inventory divide(const Inventory& inventory, Mesh mesh, std::int64_t smallest_part) {
  validate(inventory);
  core::require(smallest_part >= 1, "divide: smallest_part: expected at least 1, got ",
                smallest_part);
  double all = 0;
  for (const Parameter& parameter : inventory) all += work_of(parameter);
  const double largest = kLargestPart * all / mesh.num_owners();
  Inventory divided;
  for (const ParameterIndex w : inventory.indices()) {
    const Parameter& whole = inventory[w];
    const bool has_parts = whole.continues || is_continued(inventory, w);
    const bool stays =
        whole.column ? mesh.num_owners() == mesh.num_shards : has_parts || mesh.num_owners() == 1;
    const std::int64_t parts = stays ? 1 : num_parts(whole, largest, smallest_part);
    if (parts == 1) {
      divided.push_back(whole);
      continue;
    }
    Parameter part = whole;
    part.view.num_matrices /= parts;
    const auto [leaf, origin] = range_of(whole);
    for (std::int64_t i = 0; i < parts; ++i) {
      const std::int64_t begin = origin + i * part.view.num_matrices;
      part.name = core::message(leaf, '[', begin, ':', begin + part.view.num_matrices, ']');
      part.continues = whole.continues || i > 0;
      divided.push_back(part);
    }
  }
  return divided;
}

Inventory join(const Inventory& inventory) {
  Inventory joined;
  for (const Parameter& part : inventory) {
    const auto of_one = [](View view) {
      view.num_matrices = 1;
      return view;
    };
    const bool alike = part.continues && !joined.empty() && joined.back().column == part.column &&
                       of_one(joined.back().view) == of_one(part.view);
    if (!alike) {
      joined.push_back(part);
      continue;
    }
    Parameter& whole = joined.back();
    whole.view.num_matrices += part.view.num_matrices;
    // Joins "name[a:b]" and "name[b:c]" to "name[a:c]".
    const std::size_t colon = whole.name.rfind(':');
    const std::size_t end = part.name.rfind(':');
    if (colon != std::string::npos && end != std::string::npos)
      whole.name = whole.name.substr(0, colon) + part.name.substr(end);
  }
  for (const ParameterIndex w : joined.indices()) {
    Parameter& whole = joined[w];
    const bool alone = !whole.continues && !is_continued(joined, w);
    const std::string range = core::message("[0:", whole.view.num_matrices, ']');
    if (alone && whole.name.ends_with(range)) whole.name.resize(whole.name.size() - range.size());
  }
  return joined;
}

PerParameter<Owner> with_neighbours_together(const Inventory& inventory, Mesh mesh,
                                             PerParameter<Owner> owner) {
  using Alike = std::pair<Shape, std::optional<Shard>>;
  std::map<Alike, std::vector<ParameterIndex>> alike;  // of the leaf
  const auto key = [&](Owner one) {
    return std::tuple(mesh.shard_of(one), mesh.replicate_of(one), one);
  };
  const auto sort_leaf = [&] {
    for (const auto& [of, parts] : std::exchange(alike, {})) {
      std::vector<Owner> owners;
      for (const ParameterIndex part : parts) owners.push_back(owner[part]);
      std::sort(owners.begin(), owners.end(), [&](Owner a, Owner b) { return key(a) < key(b); });
      for (std::size_t i = 0; i < parts.size(); ++i) owner[parts[i]] = owners[i];
    }
  };
  for (const ParameterIndex w : inventory.indices()) {
    if (!inventory[w].continues) sort_leaf();
    alike[{inventory[w].shape(), inventory[w].column}].push_back(w);
  }
  sort_leaf();
  return owner;
}

}  // namespace dmuon::plan
