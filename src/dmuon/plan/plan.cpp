#include "dmuon/plan/plan.h"

#include <algorithm>
#include <cmath>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"
#include "dmuon/plan/balance.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan {
namespace {

// The matrices of every slot by shape, ascending, cut into the cheapest batches, so that a batch is
// consecutive in execution order among its slot's matrices of that shape.
std::vector<Batch> cut_batches(const std::vector<int>& owner, const ShapeGroups& groups,
                               const CostTable& costs) {
  std::vector<int> order(owner.size());
  for (std::size_t w = 0; w < owner.size(); ++w) order[w] = static_cast<int>(w);
  const auto key = [&](int w) { return std::pair(owner[w], groups.shape_of[w]); };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });

  std::vector<Batch> batches;
  for (auto first = order.begin(); first != order.end();) {
    const auto last =
        std::find_if(first, order.end(), [&](int w) { return key(w) != key(*first); });
    const int slot = owner[*first];
    const BatchCosts& shape_costs = costs[groups.shape_of[*first]];
    for (const int size : shape_costs.best_batches(static_cast<int>(last - first))) {
      batches.push_back({slot, std::vector<int>(first, first + size)});
      first += size;
    }
  }
  std::sort(batches.begin(), batches.end(), [](const Batch& a, const Batch& b) {
    return std::pair(a.slot, a.matrices.front()) < std::pair(b.slot, b.matrices.front());
  });
  return batches;
}

void check_costs(const ShapeGroups& groups, const CostTable& costs) {
  core::require(costs.size() == groups.shapes.size(),
                "make_plan: costs must have an entry for each of ", groups.shapes.size(),
                " shapes; got ", costs.size());
  for (std::size_t s = 0; s < costs.size(); ++s) {
    const auto covered = static_cast<int>(costs[s].best_seconds().size()) - 1;
    core::require(covered >= groups.num_matrices[s], "make_plan: costs of shape ",
                  groups.shapes[s].rows, " x ", groups.shapes[s].cols, " must cover ",
                  groups.num_matrices[s], " matrices; got ", covered);
  }
}

void check_batches(const Plan& plan, const Inventory& inventory) {
  std::vector<bool> seen(inventory.size(), false);
  for (std::size_t b = 0; b < plan.batches.size(); ++b) {
    const Batch& batch = plan.batches[b];
    core::require(!batch.matrices.empty(), "plan: batches[", b, "] must hold a matrix; got none");
    for (const int w : batch.matrices) {
      core::require(w >= 0 && w < static_cast<int>(inventory.size()), "plan: batches[", b,
                    "] must hold indices in [0, ", inventory.size(), "); got ", w);
      const Matrix& matrix = inventory[w];
      const Matrix& first = inventory[batch.matrices.front()];
      core::require(!seen[w], "plan: matrix '", matrix.name,
                    "' must be in one batch; it is again in batches[", b, "]");
      seen[w] = true;
      core::require(plan.owner[w] == batch.slot, "plan: batches[", b, "] of slot ", batch.slot,
                    " must hold its own matrices; got '", matrix.name, "' of slot ", plan.owner[w]);
      core::require(matrix.rows == first.rows && matrix.cols == first.cols, "plan: batches[", b,
                    "] must hold matrices of one shape, ", first.rows, " x ", first.cols, "; got '",
                    matrix.name, "', ", matrix.rows, " x ", matrix.cols);
    }
  }
  for (std::size_t w = 0; w < inventory.size(); ++w) {
    core::require(seen[w], "plan: matrix '", inventory[w].name,
                  "' must be in a batch; it is in none");
  }
}

}  // namespace

Plan make_plan(const Inventory& inventory, Mesh mesh, std::string_view strategy,
               const CostTable& costs) {
  validate(inventory);
  validate(mesh);
  const Strategy assign = find_strategy(strategy);
  const ShapeGroups groups = group_by_shape(inventory);
  check_costs(groups, costs);

  Plan plan;
  plan.mesh = mesh;
  plan.strategy = strategy;
  plan.owner = assign({inventory, groups, costs, mesh});
  plan.batches = cut_batches(plan.owner, groups, costs);
  plan.slot_s.assign(mesh.num_slots(), 0.0);
  for (const Batch& batch : plan.batches) {
    const BatchCosts& shape_costs = costs[groups.shape_of[batch.matrices.front()]];
    plan.slot_s[batch.slot] += shape_costs.batch_seconds(static_cast<int>(batch.matrices.size()));
  }
  plan.makespan_s = *std::max_element(plan.slot_s.begin(), plan.slot_s.end());
  plan.lower_bound_s = lower_bound_seconds(groups, costs, mesh.num_slots());
  return plan;
}

Plan make_plan(const Inventory& inventory, Mesh mesh, std::string_view strategy,
               std::string_view device_kind) {
  validate(inventory);
  const CostTable costs = modelled_costs(group_by_shape(inventory), device_model(device_kind));
  return make_plan(inventory, mesh, strategy, costs);
}

void validate(const Plan& plan, const Inventory& inventory) {
  validate(inventory);
  validate(plan.mesh);
  core::require(plan.owner.size() == inventory.size(),
                "plan: owner must have an entry for each of ", inventory.size(), " matrices; got ",
                plan.owner.size());
  const int num_slots = plan.mesh.num_slots();
  for (std::size_t w = 0; w < inventory.size(); ++w) {
    core::require(plan.owner[w] >= 0 && plan.owner[w] < num_slots, "plan: owner of matrix '",
                  inventory[w].name, "' must be in [0, ", num_slots, "); got ", plan.owner[w]);
  }
  check_batches(plan, inventory);
  core::require(plan.slot_s.size() == static_cast<std::size_t>(num_slots),
                "plan: slot_s must have an entry for each of ", num_slots, " slots; got ",
                plan.slot_s.size());
  for (const double seconds : plan.slot_s) {
    core::require(std::isfinite(seconds) && seconds >= 0,
                  "plan: slot_s must hold finite seconds >= 0; got ", seconds);
  }
  core::require(std::isfinite(plan.makespan_s) && plan.makespan_s >= 0,
                "plan: makespan_s must be finite and >= 0; got ", plan.makespan_s);
  core::require(std::isfinite(plan.lower_bound_s) && plan.lower_bound_s >= 0,
                "plan: lower_bound_s must be finite and >= 0; got ", plan.lower_bound_s);
}

std::uint64_t hash(const Plan& plan, const Inventory& inventory) {
  core::Hasher hasher;
  const auto add_size = [&](std::size_t size) { hasher.add(static_cast<std::int64_t>(size)); };
  hasher.add(plan.mesh.num_replicates).add(plan.mesh.num_shards).add(plan.strategy);
  add_size(inventory.size());
  for (const Matrix& matrix : inventory) {
    hasher.add(matrix.name).add(matrix.rows).add(matrix.cols).add(matrix.unit);
  }
  add_size(plan.owner.size());
  for (const int slot : plan.owner) hasher.add(slot);
  add_size(plan.batches.size());
  for (const Batch& batch : plan.batches) {
    hasher.add(batch.slot);
    add_size(batch.matrices.size());
    for (const int w : batch.matrices) hasher.add(w);
  }
  return hasher.value();
}

}  // namespace dmuon::plan
