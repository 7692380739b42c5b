#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/balance/certificate.h"
#include "dmuon/balance/owner_time.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/mesh.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

/// What a strategy decides upon. All parts are valid and belong together.
struct Problem {
  const Inventory& inventory;
  const ShapeGroups& groups;
  const balance::Problem& balance;
  Mesh mesh;
  const Options& options;
};

struct Owners {
  std::vector<int> owner;                             ///< [num matrices]
  std::optional<balance::Certificate> certificate{};  ///< where the search has found one
};

/// Deterministic.
using Strategy = Owners (*)(const Problem&);

/// @return the known names, the default first.
std::vector<std::string> strategy_names();

/// @throws InvalidArgument for an unknown name, with the known ones.
Strategy find_strategy(std::string_view name);

}  // namespace dmuon::plan
