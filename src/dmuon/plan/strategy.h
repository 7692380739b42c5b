#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dmuon/plan/cost.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/mesh.h"

namespace dmuon::plan {

/// What a strategy decides upon. All parts are valid and belong together.
struct Problem {
  const Inventory& inventory;
  const ShapeGroups& groups;
  const CostTable& costs;
  Mesh mesh;
};

/// @return [num matrices] slot index of each matrix's owner. Deterministic.
using Strategy = std::vector<int> (*)(const Problem&);

/// @return the known names, the default first.
std::vector<std::string> strategy_names();

/// @throws InvalidArgument for an unknown name, with the known ones.
Strategy find_strategy(std::string_view name);

}  // namespace dmuon::plan
