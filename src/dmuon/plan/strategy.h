#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/balance/certificate.h"
#include "dmuon/balance/owner_time.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/options.h"

namespace dmuon::plan {

/// What a strategy decides upon. All parts are valid and belong together.
struct Problem {
  const Inventory& inventory;
  const ShapeGroups& groups;
  const balance::Problem& balance;
  Mesh mesh;
  const PlanOptions& options;
};

struct Decision {
  PerParameter<Owner> owner;
  std::optional<balance::Certificate> certificate{};  ///< where the search has found one
};

/// Deterministic.
using Strategy = std::function<Decision(const Problem&)>;

/// @return the known names, the default first.
std::vector<std::string> strategy_names();

/// @throws InvalidArgument for an unknown name, with the known ones.
Strategy find_strategy(std::string_view name);

// The strategies. All but the first are for comparison.

/// eq:owner_assignment: how many matrices of each shape an owner gets, then which. Within the
/// layout slack, and no slower than lpt, round_robin and xor_layout, an assignment that spreads
/// better is taken instead; nothing is given up on one node, where no two columns share a network.
Decision load_balance(const Problem& problem);

/// Longest processing time first, matrix by matrix at what one alone takes: what is done where
/// batches are not known of.
Decision lpt(const Problem& problem);

/// One after the other, whatever they cost.
Decision round_robin(const Problem& problem);

/// Everything on one owner: the worst case.
Decision rank0(const Problem& problem);

/// Every matrix at its ideal slot (eq:comm-layout), whatever it costs: the best for communication.
/// Any G consecutive matrices sit on G different columns, and any R*G consecutive ones use every
/// slot once, on every mesh.
Decision xor_layout(const Problem& problem);

}  // namespace dmuon::plan
