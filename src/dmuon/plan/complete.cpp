#include <cstddef>
#include <iterator>
#include <optional>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/plan/plan.h"

namespace dmuon::plan {
namespace {

void check_owners(const Plan& plan) {
  core::require(plan.owner.size() == plan.inventory.size(),
                "plan: owner must have an entry for each of ", plan.inventory.size(),
                " matrices; got ", plan.owner.size());
  for (const ParameterIndex w : plan.owner.indices()) {
    core::require(plan.mesh.owners().contains(plan.owner[w]), "plan: owner of parameter '",
                  plan.inventory[w].name, "' must be in [0, ", plan.mesh.num_owners(), "); got ",
                  plan.owner[w]);
    const std::optional<Shard> column = plan.inventory[w].column;
    if (!column) continue;
    core::require(*column == plan.mesh.shard_of(plan.owner[w]), "plan: owner of parameter '",
                  plan.inventory[w].name, "' must be of column ", *column,
                  ", whose ranks alone have it; got ", plan.owner[w]);
    core::require(is_continued(plan.inventory, w) || column->value() + 1 == plan.mesh.num_shards,
                  "plan: parameter '", plan.inventory[w].name,
                  "' must end its leaf in the last of ", plan.mesh.num_shards,
                  " columns; got column ", *column);
  }
}

void check_batch(const Plan& plan, std::size_t index, PerParameter<bool>& seen) {
  const Batch& batch = plan.batches[index];
  const auto where = core::message("plan: batches[", index, "]");
  core::require(!batch.parameters.empty(), where, " must hold a parameter; got none");
  ParameterIndex previous(-1);
  for (const ParameterIndex w : batch.parameters) {
    core::require(plan.inventory.contains(w), where, " must hold indices in [0, ",
                  plan.inventory.size(), "); got ", w);
    const Parameter& parameter = plan.inventory[w];
    const Shape shape = plan.inventory[batch.parameters.front()].shape();
    core::require(!seen[w], "plan: parameter '", parameter.name,
                  "' must be in one batch; it is again in batches[", index, "]");
    seen[w] = true;
    core::require(w > previous, where, " must hold ascending indices; got ", w, " after ",
                  previous);
    previous = w;
    core::require(plan.owner[w] == batch.owner, where, " of owner ", batch.owner,
                  " must hold its own parameters; got '", parameter.name, "' of owner ",
                  plan.owner[w]);
    core::require(parameter.shape() == shape, where, " must hold parameters of one shape, ",
                  to_string(shape), "; got '", parameter.name, "', ", to_string(parameter.shape()));
  }
  const auto key = [](const Batch& b) { return std::pair(b.owner, b.parameters.front()); };
  core::require(index == 0 || key(plan.batches[index - 1]) < key(batch), where,
                " must follow the one before by owner, then by first parameter; got owner ",
                batch.owner, ", parameter ", batch.parameters.front());
}

Nanoseconds time_of(const CostTable& costs, const Shape& shape, std::ptrdiff_t num_batch) {
  const auto time_of_part = [&](const Shape& part) {
    for (const ShapeCosts& entry : costs.shapes) {
      if (entry.shape != part) continue;
      for (const BatchTime& batch : entry.batches) {
        if (batch.size == num_batch) return batch.ns;
      }
    }
    core::refuse("plan: costs must have a time for a batch of ", num_batch, " of ", to_string(part),
                 "; got none");
  };
  Nanoseconds sum = 0;
  for (const Shape& part : shape.of_costs()) sum += time_of_part(part);
  return sum;
}

double mean_batch_units(const Plan& plan) {
  if (plan.batches.empty()) return 0;
  double sum = 0;
  for (const Batch& batch : plan.batches) {
    sum += plan.inventory[batch.parameters.back()].unit -
           plan.inventory[batch.parameters.front()].unit;
  }
  return sum / static_cast<double>(plan.batches.size());
}

}  // namespace

void complete(Plan& plan) {
  check_owners(plan);
  PerParameter<bool> seen(plan.inventory.size());
  plan.loads_ns = core::PerOwner<Nanoseconds>(plan.mesh.num_owners());
  for (std::size_t b = 0; b < plan.batches.size(); ++b) {
    check_batch(plan, b, seen);
    const Batch& batch = plan.batches[b];
    const Shape shape = plan.inventory[batch.parameters.front()].shape();
    Nanoseconds& load = plan.loads_ns[batch.owner];
    load += time_of(plan.costs, shape, std::ssize(batch.parameters));
    core::require(load <= balance::kMaxTotalNs, "plan: owner ", batch.owner, " must take at most ",
                  balance::kMaxTotalNs, " ns; got ", load);
  }
  for (const ParameterIndex w : seen.indices()) {
    core::require(seen[w], "plan: parameter '", plan.inventory[w].name,
                  "' must be in a batch; it is in none");
  }
  plan.memory = memory(plan.inventory, plan.mesh, plan.owner, plan.batches, plan.options);
  plan.spread = spread(plan.inventory, plan.mesh, plan.owner, plan.options);
  plan.spread.batch_units = mean_batch_units(plan);
}

}  // namespace dmuon::plan
