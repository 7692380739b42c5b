#include "dmuon/plan/complete.h"

#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

void check_owners(const Plan& plan) {
  core::require(plan.owner.size() == plan.inventory.size(),
                "plan: owner must have an entry for each of ", plan.inventory.size(),
                " matrices; got ", plan.owner.size());
  for (std::size_t w = 0; w < plan.owner.size(); ++w) {
    core::require(plan.owner[w] >= 0 && plan.owner[w] < plan.mesh.num_owners(),
                  "plan: owner of matrix '", plan.inventory[w].name, "' must be in [0, ",
                  plan.mesh.num_owners(), "); got ", plan.owner[w]);
  }
}

void check_batch(const Plan& plan, std::size_t index, std::vector<bool>& seen) {
  const Batch& batch = plan.batches[index];
  const auto where = core::message("plan: batches[", index, "]");
  core::require(!batch.parameters.empty(), where, " must hold a matrix; got none");
  int previous = -1;
  for (const int w : batch.parameters) {
    core::require(w >= 0 && w < static_cast<int>(plan.inventory.size()), where,
                  " must hold indices in [0, ", plan.inventory.size(), "); got ", w);
    const auto place = static_cast<std::size_t>(w);
    const Parameter& matrix = plan.inventory[place];
    const Parameter& first = plan.inventory[static_cast<std::size_t>(batch.parameters.front())];
    core::require(!seen[place], "plan: matrix '", matrix.name,
                  "' must be in one batch; it is again in batches[", index, "]");
    seen[place] = true;
    core::require(w > previous, where, " must hold ascending indices; got ", w, " after ",
                  previous);
    previous = w;
    core::require(plan.owner[place] == batch.owner, where, " of owner ", batch.owner,
                  " must hold its own matrices; got '", matrix.name, "' of owner ",
                  plan.owner[place]);
    core::require(matrix.shape() == first.shape(), where, " must hold matrices of one shape, ",
                  to_string(first.shape()), "; got '", matrix.name, "', ",
                  to_string(matrix.shape()));
  }
  const auto key = [](const Batch& b) { return std::pair(b.owner, b.parameters.front()); };
  core::require(index == 0 || key(plan.batches[index - 1]) < key(batch), where,
                " must follow the one before by owner, then by first matrix; got owner ",
                batch.owner, ", matrix ", batch.parameters.front());
}

Nanoseconds time_of(const CostTable& costs, const Shape& shape, std::size_t num_batch) {
  for (const ShapeCosts& entry : costs.shapes) {
    if (entry.shape != shape) continue;
    for (const BatchTime& batch : entry.batches) {
      if (static_cast<std::size_t>(batch.size) == num_batch) return batch.ns;
    }
  }
  throw core::InvalidArgument(core::message("plan: costs must have a time for a batch of ",
                                            num_batch, " of ", to_string(shape), "; got none"));
}

double mean_batch_units(const Plan& plan) {
  if (plan.batches.empty()) return 0;
  double sum = 0;
  for (const Batch& batch : plan.batches) {
    const auto unit = [&](int w) { return plan.inventory[static_cast<std::size_t>(w)].unit; };
    sum += unit(batch.parameters.back()) - unit(batch.parameters.front());
  }
  return sum / static_cast<double>(plan.batches.size());
}

}  // namespace

void complete(Plan& plan) {
  check_owners(plan);
  std::vector<bool> seen(plan.inventory.size(), false);
  plan.loads_ns.assign(static_cast<std::size_t>(plan.mesh.num_owners()), 0);
  for (std::size_t b = 0; b < plan.batches.size(); ++b) {
    check_batch(plan, b, seen);
    const Batch& batch = plan.batches[b];
    const Parameter& first = plan.inventory[static_cast<std::size_t>(batch.parameters.front())];
    Nanoseconds& load = plan.loads_ns[static_cast<std::size_t>(batch.owner)];
    load += time_of(plan.costs, first.shape(), batch.parameters.size());
    core::require(load <= balance::kMaxTotalNs, "plan: owner ", batch.owner, " must take at most ",
                  balance::kMaxTotalNs, " ns; got ", load);
  }
  for (std::size_t w = 0; w < plan.inventory.size(); ++w) {
    core::require(seen[w], "plan: matrix '", plan.inventory[w].name,
                  "' must be in a batch; it is in none");
  }
  plan.memory = memory(plan.inventory, plan.mesh, plan.owner, plan.batches, plan.options);
  plan.spread = spread(plan.inventory, plan.mesh, plan.owner, plan.options);
  plan.spread.batch_units = mean_batch_units(plan);
}

}  // namespace dmuon::plan
