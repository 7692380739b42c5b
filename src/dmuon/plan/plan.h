#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/plan/cost.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/mesh.h"

namespace dmuon::plan {

/// Matrices of one shape and one owner that are updated together.
struct Batch {
  int slot = 0;
  std::vector<int> matrices;  ///< indices into the inventory, ascending

  bool operator==(const Batch&) const = default;
};

/// Who owns what and in which batches. Plain data, equal on all ranks.
struct Plan {
  Mesh mesh;
  std::string strategy;
  std::vector<int> owner;      ///< [num matrices] slot index
  std::vector<Batch> batches;  ///< by slot, then by first matrix; every matrix in exactly one
  std::vector<double> slot_s;  ///< [num_slots] predicted seconds of each slot
  double makespan_s = 0;       ///< the largest of slot_s
  double lower_bound_s = 0;    ///< no plan for these costs is faster

  bool operator==(const Plan&) const = default;
};

/// @param strategy one of strategy_names().
/// @param costs    one entry for each shape of group_by_shape(inventory), in that order.
/// @throws InvalidArgument, naming the first bad argument.
/// Deterministic for equal input and compiler; ranks get equal plans by one rank's JSON.
Plan make_plan(const Inventory& inventory, Mesh mesh, std::string_view strategy,
               const CostTable& costs);

/// The same with modelled costs. @param device_kind one of device_kinds().
Plan make_plan(const Inventory& inventory, Mesh mesh, std::string_view strategy,
               std::string_view device_kind);

/// @throws InvalidArgument unless the plan fits the inventory: a valid mesh, one owner in range for
///         every matrix, batches that are each of one shape and one owner and together hold every
///         matrix once, finite times >= 0, one a slot.
void validate(const Plan& plan, const Inventory& inventory);

/// What ranks compare before they communicate: mesh, strategy, matrices (name, shape, unit), owners
/// and batches. Predicted times are left out, they move no data. Equal on every machine.
std::uint64_t hash(const Plan& plan, const Inventory& inventory);

/// One JSON object that from_json reads back to an equal plan.
std::string to_json(const Plan& plan);

/// @throws InvalidArgument for text that is not such an object or does not fit the inventory.
Plan from_json(std::string_view text, const Inventory& inventory);

/// For people: per slot its matrices, bytes of fp32 master weights and momentum, and predicted
/// milliseconds, then makespan, bound and the gap between them.
/// @throws InvalidArgument as validate does.
std::string table(const Plan& plan, const Inventory& inventory);

}  // namespace dmuon::plan
