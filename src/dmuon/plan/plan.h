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

// Threads: a function of this folder writes only to arguments that are not const. Threads may share
// an object while none changes it.
namespace dmuon::plan {

/// Parameters of one owner whose matrices have one shape and are updated together.
struct Batch {
  Owner owner;
  std::vector<ParameterIndex> parameters;  ///< ascending

  bool operator==(const Batch&) const = default;
};

/// The owner of each parameter and the batches, with all inputs of these decisions. Plain data,
/// equal on all ranks.
struct Plan {
  Mesh mesh;
  std::string strategy;
  PlanOptions options;
  Inventory inventory;
  CostTable costs;
  PerParameter<Owner> owner;
  std::vector<Batch> batches;  ///< by owner, then by first matrix; every parameter in exactly one
  balance::Certificate certificate;  ///< proves that no plan for these costs beats its bound

  // Derived from the members above:
  core::PerOwner<Nanoseconds> loads_ns;  ///< predicted
  core::PerOwner<Memory> memory;
  Spread spread;

  Nanoseconds makespan_ns() const;  ///< the largest load, 0 without owners
  std::int64_t peak_bytes() const;  ///< of the fullest owner, 0 without owners
  Nanoseconds bound_ns() const { return certificate.bound; }
  double gap() const;  ///< makespan / bound - 1; 0 if both are 0

  bool operator==(const Plan&) const = default;
};

/// Makes a plan. Deterministic; the plan is equal on every machine.
/// @param strategy one of strategy_names().
/// @param costs    has an entry for every shape of the inventory.
/// @throws InvalidArgument, naming the first bad argument. If no plan fits max_memory_bytes, it
///         names a limit that one meets.
Plan make_plan(const Inventory& inventory, Mesh mesh, std::string_view strategy,
               const CostTable& costs, const PlanOptions& options = {});

/// Makes a plan from a decision of eq:owner_assignment that was made elsewhere.
/// @param strategy the plan's name.
/// @param counts   matrices of each shape of group_by_shape(inventory), without parameters of
///                 single columns, which are assigned afterwards.
Plan make_plan_from_counts(const Inventory& inventory, Mesh mesh, std::string_view strategy,
                           const core::PerOwner<PerShape<int>>& counts, const CostTable& costs,
                           const PlanOptions& options = {});

/// Computes loads, memory and spread from the rest of the plan.
/// @throws InvalidArgument unless owners are in range and batches are each of one shape and one
///         owner, have measured sizes, and together hold every matrix once.
void complete(Plan& plan);

/// Returns the batches of each slot's ranks, which update them together: the i-th batches of a
/// slot's owners are one.
core::Vector<core::Slot, std::vector<std::vector<ParameterIndex>>> batches_by_slot(
    const Plan& plan);

/// Hashes the parts that ranks compare before they communicate: mesh, matrices (name, shape, unit),
/// owners and batches. Ignores predicted times, which move no data. Equal on every machine.
std::uint64_t hash(const Plan& plan);

/// Returns one JSON object, described in docs/plans.md, that from_json reads back to an equal plan.
std::string to_json(const Plan& plan);

/// @throws InvalidArgument, naming the place in the text, if it is no plan of this version, if
///         owners and batches do not hold every matrix once, or if the bound is not proved.
Plan from_json(std::string_view text);

/// Checks that the plan is for these matrices (names, shapes, units, in this order, however stacks
/// are divided) and this mesh.
/// @throws InvalidArgument with the first difference.
void require_fit(const Plan& plan, const Inventory& inventory, Mesh mesh);

}  // namespace dmuon::plan
