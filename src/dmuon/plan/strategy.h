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

/// The input of a strategy. All parts are valid and belong together.
struct Problem {
  const Inventory& inventory;
  const ShapeGroups& groups;
  const balance::Problem& balance;
  Mesh mesh;
  const PlanOptions& options;
};

struct Decision {
  PerParameter<Owner> owner;
  std::optional<balance::Certificate> certificate{};  ///< set if the search has found one
};

/// A deterministic, pure function.
using Strategy = std::function<Decision(const Problem&)>;

/// @return the known names, the default first.
std::vector<std::string> strategy_names();

/// @throws InvalidArgument for an unknown name, with the known ones.
Strategy find_strategy(std::string_view name);

/// False if the strategy chooses the same owners whatever batches cost; but parameters of single
/// columns are always dealt by costs.
/// @throws InvalidArgument as find_strategy.
bool reads_costs(std::string_view name);

// The strategies. All except the first are for comparison.

/// Solves eq:owner_assignment for the number of matrices of each shape at an owner, then places
/// them. Prefers an assignment that spreads better if it is within the layout slack and no slower
/// than lpt, round_robin and xor_layout. Spends no slack on one node, where columns share no
/// network.
Decision load_balance(const Problem& problem);

/// Longest processing time first, matrix by matrix at the time of a single matrix, as in programs
/// that know no batches.
Decision lpt(const Problem& problem);

/// Assigns parameters to owners in turn, whatever they cost.
Decision round_robin(const Problem& problem);

/// Assigns everything to one owner: the worst case.
Decision rank0(const Problem& problem);

/// Assigns every matrix to its ideal slot (eq:comm-layout), whatever it costs: the best for
/// communication. On every mesh, any G consecutive matrices are on G different columns, and any R*G
/// consecutive ones use every slot once.
Decision xor_layout(const Problem& problem);

}  // namespace dmuon::plan
