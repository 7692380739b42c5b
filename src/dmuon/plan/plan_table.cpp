#include <cstdint>
#include <iomanip>
#include <sstream>

#include "dmuon/plan/plan.h"

namespace dmuon::plan {
namespace {

constexpr std::int64_t kStateBytes = 8;  // of one element at its owner: fp32 master and momentum

}  // namespace

std::string table(const Plan& plan, const Inventory& inventory) {
  validate(plan, inventory);
  const int num_slots = plan.mesh.num_slots();
  std::vector<int> num_matrices(num_slots, 0);
  std::vector<std::int64_t> state_bytes(num_slots, 0);
  for (std::size_t w = 0; w < inventory.size(); ++w) {
    ++num_matrices[plan.owner[w]];
    state_bytes[plan.owner[w]] += kStateBytes * inventory[w].rows * inventory[w].cols;
  }

  std::ostringstream out;
  out << std::fixed << std::setprecision(3);
  out << "strategy " << plan.strategy << ", mesh " << plan.mesh.num_replicates << " x "
      << plan.mesh.num_shards << ", " << inventory.size() << " matrices in " << plan.batches.size()
      << " batches\n";
  out << "  slot  replicate  shard  matrices       state bytes  predicted ms\n";
  for (int t = 0; t < num_slots; ++t) {
    const Slot slot = slot_at(t, plan.mesh);
    out << std::setw(6) << t << std::setw(11) << slot.replicate << std::setw(7) << slot.shard
        << std::setw(10) << num_matrices[t] << std::setw(18) << state_bytes[t] << std::setw(14)
        << plan.slot_s[t] * 1e3 << "\n";
  }
  out << "makespan " << plan.makespan_s * 1e3 << " ms, lower bound " << plan.lower_bound_s * 1e3
      << " ms";
  if (plan.lower_bound_s > 0) {
    out << ", gap " << std::setprecision(2) << (plan.makespan_s / plan.lower_bound_s - 1) * 100
        << " %";
  }
  out << "\n";
  return out.str();
}

}  // namespace dmuon::plan
