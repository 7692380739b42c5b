#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/balance/certificate.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/plan/cost.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/memory.h"
#include "dmuon/plan/options.h"
#include "dmuon/plan/spread.h"

namespace dmuon::plan {

/// Parameters of one owner whose matrices have one shape and are updated together.
struct Batch {
  Owner owner;
  std::vector<ParameterIndex> parameters;  ///< ascending

  bool operator==(const Batch&) const = default;
};

/// Who owns what and in which batches, with everything it follows from. Plain data, equal on all
/// ranks.
struct Plan {
  Mesh mesh;
  std::string strategy;
  PlanOptions options;
  Inventory inventory;
  CostTable costs;
  PerParameter<Owner> owner;
  std::vector<Batch> batches;  ///< by owner, then by first matrix; every parameter in exactly one
  balance::Certificate certificate;  ///< that no plan for these costs is faster than its bound

  // Follows from the above.
  core::PerOwner<Nanoseconds> loads_ns;  ///< predicted
  core::PerOwner<Memory> memory;
  Spread spread;

  Nanoseconds makespan_ns() const;  ///< the largest load, 0 without owners
  std::int64_t peak_bytes() const;  ///< of the fullest owner, 0 without owners
  Nanoseconds bound_ns() const { return certificate.bound; }
  double gap() const;  ///< makespan / bound - 1; 0 where both are 0

  bool operator==(const Plan&) const = default;
};

/// @param strategy one of strategy_names().
/// @param costs    has an entry for every shape of the inventory.
/// @throws InvalidArgument, naming the first bad argument; for a max_memory_bytes that no plan was
///         found for, with one that would do.
/// Deterministic and equal on every machine.
Plan make_plan(const Inventory& inventory, Mesh mesh, std::string_view strategy,
               const CostTable& costs, const PlanOptions& options = {});

/// The same, with the decision of eq:owner_assignment made elsewhere.
/// @param strategy what the plan is called.
/// @param counts   matrices of each shape of group_by_shape(inventory), without parameters of
///                 single columns, which are dealt afterwards.
Plan make_plan_from_counts(const Inventory& inventory, Mesh mesh, std::string_view strategy,
                           const core::PerOwner<PerShape<int>>& counts, const CostTable& costs,
                           const PlanOptions& options = {});

/// Fills what follows from the rest of the plan: loads, memory, spread.
/// @throws InvalidArgument unless owners are in range and batches are each of one shape and one
///         owner, have measured sizes, and together hold every matrix once.
void complete(Plan& plan);

/// What ranks compare before they communicate: mesh, matrices (name, shape, unit), owners and
/// batches. Predicted times are left out, they move no data. Equal on every machine.
std::uint64_t hash(const Plan& plan);

/// One JSON object, described in docs/plans.md, that from_json reads back to an equal plan.
std::string to_json(const Plan& plan);

/// @throws InvalidArgument, naming the place in the text, for what is no plan of this version, for
///         owners and batches that do not hold every matrix once, and for a bound that its
///         certificate does not prove.
Plan from_json(std::string_view text);

/// @throws InvalidArgument with the first difference, unless the plan is for these matrices (names,
///         shapes, units, in this order, however stacks are divided) and this mesh.
void require_fit(const Plan& plan, const Inventory& inventory, Mesh mesh);

}  // namespace dmuon::plan
