#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <numeric>
#include <sstream>

#include "dmuon/plan/plan.h"

namespace dmuon::plan {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// The slowest first, then by index.
std::vector<int> by_load(const Plan& plan) {
  std::vector<int> owners(plan.loads_ns.size());
  std::iota(owners.begin(), owners.end(), 0);
  std::stable_sort(owners.begin(), owners.end(), [&](int a, int b) {
    return plan.loads_ns[static_cast<std::size_t>(a)] > plan.loads_ns[static_cast<std::size_t>(b)];
  });
  return owners;
}

void print_owner(std::ostream& out, const Plan& plan, int owner, int num_matrices,
                 int num_batches) {
  const auto o = static_cast<std::size_t>(owner);
  out << std::setw(6) << owner << std::setw(6) << plan.mesh.replicate_of(owner) << std::setw(8)
      << plan.mesh.shard_of(owner) << std::setw(10) << num_matrices << std::setw(9) << num_batches
      << std::setprecision(2) << ' ' << std::setw(10)
      << static_cast<double>(plan.memory[o].state) / kMiB << ' ' << std::setw(10)
      << static_cast<double>(plan.memory[o].total()) / kMiB << ' ' << std::setw(11)
      << std::setprecision(3) << milliseconds(plan.loads_ns[o]) << "\n";
}

}  // namespace

std::string table(const Plan& plan, int max_rows) {
  std::vector<int> num_matrices(plan.loads_ns.size(), 0);
  std::vector<int> num_batches(plan.loads_ns.size(), 0);
  for (const Batch& batch : plan.batches) {
    num_matrices[static_cast<std::size_t>(batch.owner)] += static_cast<int>(batch.matrices.size());
    ++num_batches[static_cast<std::size_t>(batch.owner)];
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(3);
  out << "strategy " << plan.strategy << ", mesh " << plan.mesh.num_replicates << " x "
      << plan.mesh.num_shards;
  if (plan.mesh.tensor_parallel > 1) out << ", tensor parallel " << plan.mesh.tensor_parallel;
  out << ", " << plan.inventory.size() << " matrices in " << plan.batches.size()
      << " batches\ncosts: " << plan.costs.source << "\n"
      << " owner  node  column  matrices  batches  state MiB  total MiB  predicted ms\n";
  std::vector<int> shown = by_load(plan);
  const auto all = shown.size();
  if (shown.size() > static_cast<std::size_t>(std::max(0, max_rows))) {
    shown.resize(static_cast<std::size_t>(std::max(0, max_rows)));
  }
  for (const int owner : shown) {
    print_owner(out, plan, owner, num_matrices[static_cast<std::size_t>(owner)],
                num_batches[static_cast<std::size_t>(owner)]);
  }
  if (shown.size() < all) out << "   ... and " << all - shown.size() << " faster owners\n";
  out << "makespan " << milliseconds(plan.makespan_ns()) << " ms, no plan is below "
      << milliseconds(plan.bound_ns()) << " ms";
  if (plan.bound_ns() > 0) out << ", gap " << std::setprecision(2) << plan.gap() * 100 << " %";
  out << "\n"
      << std::setprecision(2) << "window of " << std::max(1, plan.options.lookahead)
      << " units: " << plan.spread.distinct_columns << " of " << plan.mesh.num_shards
      << " columns, " << plan.spread.repeats << " repeats, busiest column "
      << plan.spread.busiest_column << " x the mean\n";
  const auto [least, most] =
      std::minmax_element(plan.spread.column_bytes.begin(), plan.spread.column_bytes.end());
  out << "weights of a column: " << static_cast<double>(*least) / kMiB << " to "
      << static_cast<double>(*most) / kMiB << " MiB\n";
  return out.str();
}

}  // namespace dmuon::plan
