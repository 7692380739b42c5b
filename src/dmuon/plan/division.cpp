#include "dmuon/plan/division.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

// Of an owner's share of the work. Smaller parts balance better and travel in more messages.
constexpr double kLargestPart = 1. / 8;

// What Newton-Schulz' FLOPs grow with.
double work_of(const Parameter& parameter) {
  return static_cast<double>(parameter.num_elements()) *
         static_cast<double>(std::min(parameter.rows, parameter.cols));
}

// The smallest divisor of the stack that makes parts small enough.
std::int64_t num_parts(const Parameter& stack, double largest) {
  const std::int64_t most = stack.num_matrices;
  for (std::int64_t parts = 1; parts < most; ++parts) {
    if (most % parts == 0 && work_of(stack) <= largest * static_cast<double>(parts)) return parts;
  }
  return most;
}

}  // namespace

Inventory divide(const Inventory& inventory, int num_owners) {
  double all = 0;
  for (const Parameter& parameter : inventory) all += work_of(parameter);
  const double largest = kLargestPart * all / num_owners;
  Inventory divided;
  for (const ParameterIndex w : inventory.indices()) {
    const Parameter& whole = inventory[w];
    const ParameterIndex next(w.value() + 1);
    const bool has_parts =
        whole.continues || (inventory.contains(next) && inventory[next].continues);
    const std::int64_t parts = has_parts || num_owners == 1 ? 1 : num_parts(whole, largest);
    if (parts == 1) {
      divided.push_back(whole);
      continue;
    }
    Parameter part = whole;
    part.num_matrices /= parts;
    for (std::int64_t begin = 0; begin < whole.num_matrices; begin += part.num_matrices) {
      part.name = core::message(whole.name, '[', begin, ':', begin + part.num_matrices, ']');
      part.continues = begin > 0;
      divided.push_back(part);
    }
  }
  return divided;
}

Inventory join(const Inventory& inventory) {
  Inventory joined;
  for (const Parameter& part : inventory) {
    const bool alike = part.continues && !joined.empty() && joined.back().rows == part.rows &&
                       joined.back().cols == part.cols;
    if (!alike) {
      joined.push_back(part);
      continue;
    }
    Parameter& whole = joined.back();
    whole.num_matrices += part.num_matrices;
    // "name[a:b]" and "name[b:c]" are "name[a:c]".
    const std::size_t colon = whole.name.rfind(':');
    const std::size_t end = part.name.rfind(':');
    if (colon != std::string::npos && end != std::string::npos)
      whole.name = whole.name.substr(0, colon) + part.name.substr(end);
  }
  for (const ParameterIndex w : joined.indices()) {
    const ParameterIndex next(w.value() + 1);
    Parameter& whole = joined[w];
    const bool alone = !whole.continues && !(joined.contains(next) && joined[next].continues);
    const std::string range = core::message("[0:", whole.num_matrices, ']');
    if (alone && whole.name.ends_with(range)) whole.name.resize(whole.name.size() - range.size());
  }
  return joined;
}

PerParameter<Owner> with_neighbours_together(const Inventory& inventory, Mesh mesh,
                                             PerParameter<Owner> owner) {
  std::map<Shape, std::vector<ParameterIndex>> alike;  // of the leaf
  const auto key = [&](Owner one) {
    return std::tuple(mesh.shard_of(one), mesh.replicate_of(one), one);
  };
  const auto sort_leaf = [&] {
    for (const auto& [shape, parts] : std::exchange(alike, {})) {
      std::vector<Owner> owners;
      for (const ParameterIndex part : parts) owners.push_back(owner[part]);
      std::sort(owners.begin(), owners.end(), [&](Owner a, Owner b) { return key(a) < key(b); });
      for (std::size_t i = 0; i < parts.size(); ++i) owner[parts[i]] = owners[i];
    }
  };
  for (const ParameterIndex w : inventory.indices()) {
    if (!inventory[w].continues) sort_leaf();
    alike[inventory[w].shape()].push_back(w);
  }
  sort_leaf();
  return owner;
}

}  // namespace dmuon::plan
