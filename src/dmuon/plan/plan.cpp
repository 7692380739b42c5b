#include "dmuon/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "dmuon/balance/solve.h"
#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"
#include "dmuon/plan/column_parts.h"
#include "dmuon/plan/division.h"
#include "dmuon/plan/placement.h"
#include "dmuon/plan/state_bytes.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan {
namespace {

constexpr std::int64_t kRooms = 8;  // sizes of room for state, see decide_within
constexpr int kMostNsSteps = 1000;
constexpr std::int64_t kMostReserveBytes = std::int64_t{1} << 40;

// Cuts the matrices of every owner, by shape and ascending, into the cheapest batches. So a batch
// is consecutive in execution order among its owner's matrices of that shape.
std::vector<Batch> cut_batches(const PerParameter<Owner>& owner, const ShapeGroups& groups,
                               const balance::Problem& problem) {
  const auto key = [&](ParameterIndex w) { return std::pair(owner[w], groups.shape_of[w]); };
  const std::vector<ParameterIndex> order = core::sorted_by(owner.indices(), key);
  std::vector<Batch> batches;
  for (auto first = order.begin(); first != order.end();) {
    const auto [rank, shape] = key(*first);
    const auto last = std::find_if(
        first, order.end(), [&](ParameterIndex w) { return key(w) != std::pair(rank, shape); });
    for (const int size : problem.time(shape).batches(static_cast<int>(last - first))) {
      batches.push_back({rank, std::vector<ParameterIndex>(first, first + size)});
      first += size;
    }
  }
  std::sort(batches.begin(), batches.end(), [](const Batch& a, const Batch& b) {
    return std::pair(a.owner, a.parameters.front()) < std::pair(b.owner, b.parameters.front());
  });
  return batches;
}

// Makes one plan with at most `state_bytes` of state an owner.
Plan decide(const Plan& base, const ShapeGroups& groups, balance::Instance instance,
            std::int64_t state_bytes, const Strategy& strategy) {
  instance.max_bytes = state_bytes;
  const balance::Problem problem(std::move(instance));
  Plan plan = base;
  Decision decision = decide_with_columns(plan, groups, problem, strategy);
  plan.owner = with_neighbours_together(plan.inventory, plan.mesh, std::move(decision.owner));
  plan.batches = cut_batches(plan.owner, groups, problem);
  complete(plan);
  plan.certificate = decision.certificate ? *std::move(decision.certificate)
                                          : balance::lower_bound(problem, plan.makespan_ns());
  return plan;
}

// Finds the room for state by trials, because the other memory depends on the plan. It tries the
// same rooms for every cap, so the error can name the smallest cap that one of them meets.
Plan decide_within(const Plan& base, const ShapeGroups& groups, const balance::Instance& instance,
                   const Strategy& strategy) {
  const std::int64_t unlimited = balance::Instance{}.max_bytes;
  const std::int64_t reserve = base.options.reserve_bytes;
  const std::int64_t cap = base.options.max_memory_bytes - reserve;
  Plan plan = decide(base, groups, instance, unlimited, strategy);
  std::int64_t smallest = plan.peak_bytes();
  if (base.options.max_memory_bytes == 0 || smallest <= cap) return plan;
  const std::int64_t least = sufficient_bytes_with_columns(base);
  std::int64_t most = least;
  for (const Memory& one : plan.memory) most = std::max(most, one.state);
  for (std::int64_t left = kRooms - 1; left >= 0; --left) {
    plan = decide(base, groups, instance, least + (most - least) / kRooms * left, strategy);
    if (plan.peak_bytes() <= cap) return plan;
    smallest = std::min(smallest, plan.peak_bytes());
  }
  const std::string reserved =
      reserve == 0 ? "" : core::message(", ", reserve, " of them in reserve for the device");
  core::refuse("plan: max_memory_bytes must be >= ", smallest + reserve, " for ", base.strategy,
               " on this mesh", reserved, "; got ", cap + reserve);
}

Plan make(const Inventory& inventory, Mesh mesh, std::string_view strategy, const CostTable& costs,
          const PlanOptions& options, const Strategy& decision) {
  validate(inventory);
  validate(mesh);
  validate(options);
  const ShapeGroups groups = group_by_shape(inventory);
  Plan plan;
  plan.mesh = mesh;
  plan.strategy = strategy;
  plan.options = options;
  plan.inventory = inventory;
  plan.costs = costs;
  return decide_within(plan, groups, instance_of(groups, costs, mesh.num_owners(), options.rule),
                       decision);
}

balance::Assignment assignment_of(const Problem& problem,
                                  const core::PerOwner<PerShape<int>>& counts) {
  core::require(counts.size() == problem.mesh.num_owners(),
                "make_plan: counts must have a row for each of ", problem.mesh.num_owners(),
                " owners; got ", counts.size());
  balance::Assignment assignment(problem.balance);
  PerShape<int> left = problem.balance.num_matrices();
  for (const Owner owner : counts.indices()) {
    core::require(counts[owner].size() == left.size(), "make_plan: counts of owner ", owner,
                  " must have an entry for each of ", left.size(), " shapes; got ",
                  counts[owner].size());
    for (const ShapeIndex s : left.indices()) {
      const int count = counts[owner][s];
      core::require(count >= 0 && count <= left[s], "make_plan: counts of ",
                    to_string(problem.groups.shapes[s]), " must be >= 0 and add up to ",
                    problem.balance.num_matrices(s), "; got ", count, " for owner ", owner);
      left[s] -= count;
      assignment.add(owner, s, count);
    }
  }
  for (const ShapeIndex s : left.indices()) {
    core::require(left[s] == 0, "make_plan: counts of ", to_string(problem.groups.shapes[s]),
                  " must add up to ", problem.balance.num_matrices(s), "; got ",
                  problem.balance.num_matrices(s) - left[s]);
  }
  return assignment;
}

}  // namespace

void validate(const PlanOptions& options, std::string_view function) {
  schedule::check(options, function);
  core::require(
      std::isfinite(options.layout_slack) && options.layout_slack >= 0 && options.layout_slack <= 1,
      function, ": layout_slack must be in [0, 1]; got ", options.layout_slack);
  core::require(options.max_memory_bytes >= 0, function,
                ": max_memory_bytes must be positive, or none; got ", options.max_memory_bytes);
  core::require(options.reserve_bytes >= 0 && options.reserve_bytes <= kMostReserveBytes, function,
                ": reserve_bytes must be in [0, 2^40]; got ", options.reserve_bytes);
  core::require(options.weight_bytes >= 1 && options.weight_bytes <= 8 &&
                    options.gradient_bytes >= 1 && options.gradient_bytes <= 8,
                function, ": weight_bytes and gradient_bytes must be in [1, 8]; got ",
                options.weight_bytes, " and ", options.gradient_bytes);
  core::require(options.ns_bytes >= 1 && options.ns_bytes <= 8 && options.ns_steps >= 0 &&
                    options.ns_steps <= kMostNsSteps,
                function, ": ns_bytes must be in [1, 8] and ns_steps in [0, ", kMostNsSteps,
                "]; got ", options.ns_bytes, " and ", options.ns_steps);
  require_rule(options.rule, core::message(function, ": rule: expected"));
}

Nanoseconds Plan::makespan_ns() const {
  return loads_ns.empty() ? 0 : *std::max_element(loads_ns.begin(), loads_ns.end());
}

std::int64_t Plan::peak_bytes() const {
  std::int64_t peak = 0;
  for (const Memory& one : memory) peak = std::max(peak, one.total());
  return peak;
}

double Plan::gap() const {
  if (bound_ns() == 0) return makespan_ns() == 0 ? 0 : std::numeric_limits<double>::infinity();
  return static_cast<double>(makespan_ns() - bound_ns()) / static_cast<double>(bound_ns());
}

Plan make_plan(const Inventory& inventory, Mesh mesh, std::string_view strategy,
               const CostTable& costs, const PlanOptions& options) {
  return make(inventory, mesh, strategy, costs, options, find_strategy(strategy));
}

Plan make_plan_from_counts(const Inventory& inventory, Mesh mesh, std::string_view strategy,
                           const core::PerOwner<PerShape<int>>& counts, const CostTable& costs,
                           const PlanOptions& options) {
  return make(inventory, mesh, strategy, costs, options, [&](const Problem& problem) -> Decision {
    return {place(problem.inventory, problem.groups, assignment_of(problem, counts), problem.mesh,
                  problem.options)};
  });
}

void require_fit(const Plan& plan, const Inventory& given, Mesh mesh) {
  core::require(plan.mesh == mesh, "plan: mesh: expected ", mesh.num_replicates, " x ",
                mesh.num_shards, " x ", mesh.tensor_parallel, ", the plan is for ",
                plan.mesh.num_replicates, " x ", plan.mesh.num_shards, " x ",
                plan.mesh.tensor_parallel);
  const Inventory inventory = join(given);
  const Inventory of_plan = join(plan.inventory);
  for (const ParameterIndex w : inventory.indices()) {
    if (!of_plan.contains(w)) break;
    const Parameter& wanted = inventory[w];
    const Parameter& planned = of_plan[w];
    core::require(wanted == planned, "plan: parameter ", w, ": expected '", wanted.name, "', ",
                  to_string(wanted.shape()), ", unit ", wanted.unit, "; the plan has '",
                  planned.name, "', ", to_string(planned.shape()), ", unit ", planned.unit);
  }
  core::require(inventory.size() == of_plan.size(), "plan: expected ", inventory.size(),
                " parameters; the plan has ", of_plan.size());
}

core::Vector<core::Slot, std::vector<std::vector<ParameterIndex>>> batches_by_slot(
    const Plan& plan) {
  core::Vector<core::Slot, std::vector<std::vector<ParameterIndex>>> all(plan.mesh.num_slots());
  core::PerOwner<std::size_t> num_batches(plan.mesh.num_owners());
  for (const Batch& batch : plan.batches) {
    auto& of_slot = all[plan.mesh.slot_of(batch.owner)];
    const std::size_t place = num_batches[batch.owner]++;
    if (place == of_slot.size()) of_slot.emplace_back();
    for (const ParameterIndex w : batch.parameters) {
      core::invariant(plan.owner.at(w) == batch.owner, "plan: parameter ", w,
                      " is in a batch of owner ", batch.owner, " and owned by another");
      of_slot[place].push_back(w);
    }
  }
  return all;
}

std::uint64_t hash(const Plan& plan) {
  core::Hasher hasher;
  const auto add_size = [&](const auto& list) { hasher.add(std::ssize(list)); };
  hasher.add(plan.mesh.num_replicates).add(plan.mesh.num_shards).add(plan.mesh.tensor_parallel);
  add_size(plan.inventory.values());
  for (const Parameter& parameter : plan.inventory) {
    hasher.add(parameter.name)
        .add(parameter.view.rows)
        .add(parameter.view.cols)
        .add(parameter.unit);
    hasher.add(parameter.tensor_parallel ? 1 : 0);
    if (parameter.view.num_matrices != 1) hasher.add(parameter.view.num_matrices);
    if (parameter.continues) hasher.add(0);
    if (parameter.column) hasher.add(1).add(parameter.column->value());
    if (parameter.view.column_blocks != 1) hasher.add(-parameter.view.column_blocks);
    if (parameter.view.transposed) hasher.add(-1);
    if (!parameter.view.heights.empty()) {
      add_size(parameter.view.heights);
      for (const std::int64_t height : parameter.view.heights) hasher.add(height);
    }
  }
  for (const Owner owner : plan.owner) hasher.add(owner.value());
  add_size(plan.batches);
  for (const Batch& batch : plan.batches) {
    hasher.add(batch.owner.value());
    add_size(batch.parameters);
    for (const ParameterIndex w : batch.parameters) hasher.add(w.value());
  }
  return hasher.value();
}

}  // namespace dmuon::plan
