#include "dmuon/plan/column_parts.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "dmuon/balance/assignment.h"
#include "dmuon/balance/solve.h"
#include "dmuon/plan/spread_bytes.h"
#include "dmuon/plan/state_bytes.h"

namespace dmuon::plan {
namespace {

// Holds the parameters that any rank may own.
struct Free {
  Inventory inventory;
  std::vector<ParameterIndex> indices;  // in the inventory of all
  ShapeGroups groups;
  balance::Instance instance;
};

Free free_of(const Plan& plan) {
  Free free;
  for (const ParameterIndex w : plan.inventory.indices()) {
    if (plan.inventory[w].column) continue;
    free.inventory.push_back(plan.inventory[w]);
    free.indices.push_back(w);
  }
  free.groups = group_by_shape(free.inventory);
  free.instance = instance_of(free.groups, plan.costs, plan.mesh.num_owners(), plan.options.rule);
  return free;
}

// Returns the most bytes that an owner has of the others: its share of a column, and one parameter
// more if the column has several owners.
std::int64_t dealt_bytes(const Plan& plan) {
  std::int64_t column = 0;
  std::int64_t largest = 0;
  for (const Parameter& parameter : plan.inventory) {
    if (parameter.column != Shard(0)) continue;  // columns are alike
    const std::int64_t bytes = state_bytes(parameter.shape(), plan.options.rule);
    column += bytes;
    largest = std::max(largest, bytes);
  }
  const int num_members = plan.mesh.num_owners() / plan.mesh.num_shards;
  return num_members == 1 ? column : column / num_members + largest;
}

// Assigns the parameters of single columns, the costliest first, each to the owner of its column
// with the least load, among those with room for its state.
void deal(const Plan& plan, const ShapeGroups& groups, balance::Assignment assignment,
          PerParameter<Owner>* owner) {
  const auto cost = [&](ParameterIndex w) {
    return batch_times(plan.costs, plan.inventory[w].shape()).front().ns;
  };
  for (const ParameterIndex w :
       core::sorted_by(plan.inventory.indices(), [&](ParameterIndex one) { return -cost(one); })) {
    const Parameter& parameter = plan.inventory[w];
    if (!parameter.column) continue;
    const ShapeIndex shape = groups.shape_of[w];
    std::optional<std::tuple<bool, Nanoseconds, Owner>> least;
    for (const Owner one : plan.mesh.owners()) {
      const std::tuple key(!assignment.fits(one, shape, 1), assignment.load(one), one);
      if (plan.mesh.shard_of(one) == *parameter.column && (!least || key < *least)) least = key;
    }
    core::require(least.has_value(), "plan: parameter '", parameter.name,
                  "' must be of a column in [0, ", plan.mesh.num_shards, "); got ",
                  *parameter.column);
    const Owner chosen = std::get<Owner>(*least);
    (*owner)[w] = chosen;
    assignment.add(chosen, shape, 1);
  }
}

}  // namespace

std::int64_t sufficient_bytes_with_columns(const Plan& plan) {
  return balance::sufficient_bytes(balance::Problem(free_of(plan).instance)) + dealt_bytes(plan);
}

Decision decide_with_columns(const Plan& plan, const ShapeGroups& groups,
                             const balance::Problem& problem, const Strategy& strategy) {
  const bool all_free = std::none_of(plan.inventory.begin(), plan.inventory.end(),
                                     [](const Parameter& one) { return one.column.has_value(); });
  if (all_free) return strategy({plan.inventory, groups, problem, plan.mesh, plan.options});

  Free free = free_of(plan);
  const std::int64_t left = problem.instance().max_bytes - dealt_bytes(plan);
  free.instance.max_bytes = std::max<std::int64_t>(left, 0);
  const balance::Problem problem_of_free(std::move(free.instance));
  const Decision decided =
      strategy({free.inventory, free.groups, problem_of_free, plan.mesh, plan.options});
  Decision decision{PerParameter<Owner>(plan.inventory.size())};
  balance::Assignment assignment(problem);
  for (const ParameterIndex w : free.inventory.indices()) {
    const ParameterIndex index = free.indices[w.position()];
    decision.owner[index] = decided.owner[w];
    assignment.add(decided.owner[w], groups.shape_of[index], 1);
  }
  deal(plan, groups, std::move(assignment), &decision.owner);
  PerParameter<bool> movable;
  for (const Parameter& parameter : plan.inventory) movable.push_back(parameter.column.has_value());
  decision.owner = with_bytes_spread({plan.inventory, groups, problem, plan.mesh, plan.options},
                                     std::move(decision.owner), movable);
  return decision;
}

}  // namespace dmuon::plan
