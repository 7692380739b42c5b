#include "dmuon/plan/column_parts.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "dmuon/balance/assignment.h"

namespace dmuon::plan {
namespace {

// What an owner has of them at most: its share of a column, and one more.
std::int64_t most_bytes(const Inventory& inventory, const Mesh& mesh) {
  std::int64_t column = 0;
  std::int64_t largest = 0;
  for (const Parameter& parameter : inventory) {
    if (parameter.column != Shard(0)) continue;  // columns are alike
    column += kStateBytes * parameter.num_elements();
    largest = std::max(largest, kStateBytes * parameter.num_elements());
  }
  return column / (mesh.num_owners() / mesh.num_shards) + largest;
}

// Deals the parameters of single columns, the costliest first, each to the owner of its column that
// has least to do by then.
void deal(const Plan& plan, const ShapeGroups& groups, balance::Assignment assignment,
          PerParameter<Owner>* owner) {
  const auto cost = [&](ParameterIndex w) {
    return shape_costs(plan.costs, plan.inventory[w].shape()).batches.front().ns;
  };
  for (const ParameterIndex w :
       core::sorted_by(plan.inventory.indices(), [&](ParameterIndex one) { return -cost(one); })) {
    const Parameter& parameter = plan.inventory[w];
    if (!parameter.column) continue;
    std::optional<std::pair<Nanoseconds, Owner>> least;
    for (const Owner one : plan.mesh.owners()) {
      const std::pair key(assignment.load(one), one);
      if (plan.mesh.shard_of(one) == *parameter.column && (!least || key < *least)) least = key;
    }
    core::require(least.has_value(), "plan: parameter '", parameter.name,
                  "' must be of a column in [0, ", plan.mesh.num_shards, "); got ",
                  *parameter.column);
    (*owner)[w] = least->second;
    assignment.add(least->second, groups.shape_of[w], 1);
  }
}

}  // namespace

Decision decide_with_columns(const Plan& plan, const ShapeGroups& groups,
                             const balance::Problem& problem, const Decide& strategy) {
  Inventory free;
  std::vector<ParameterIndex> indices;
  for (const ParameterIndex w : plan.inventory.indices()) {
    if (plan.inventory[w].column) continue;
    free.push_back(plan.inventory[w]);
    indices.push_back(w);
  }
  if (free.size() == plan.inventory.size())
    return strategy({plan.inventory, groups, problem, plan.mesh, plan.options});

  const ShapeGroups groups_of_free = group_by_shape(free);
  balance::Instance instance =
      instance_of(groups_of_free, plan.costs, plan.mesh.num_owners(), kStateBytes);
  instance.max_bytes = std::max<std::int64_t>(
      problem.instance().max_bytes - most_bytes(plan.inventory, plan.mesh), 0);
  const balance::Problem problem_of_free(std::move(instance));
  const Decision decided =
      strategy({free, groups_of_free, problem_of_free, plan.mesh, plan.options});

  Decision decision{PerParameter<Owner>(plan.inventory.size())};
  balance::Assignment assignment(problem);
  for (const ParameterIndex w : free.indices()) {
    const ParameterIndex index = indices[w.position()];
    decision.owner[index] = decided.owner[w];
    assignment.add(decided.owner[w], groups.shape_of[index], 1);
  }
  deal(plan, groups, std::move(assignment), &decision.owner);
  return decision;
}

}  // namespace dmuon::plan
