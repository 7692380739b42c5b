#include "dmuon/plan/strategy.h"

#include "dmuon/balance/construct.h"
#include "dmuon/core/error.h"
#include "dmuon/core/named.h"
#include "dmuon/plan/placement.h"

namespace dmuon::plan {
namespace {

struct Entry {
  std::string_view name;
  Decision (*strategy)(const Problem&);
  bool reads_costs;
};

constexpr Entry kStrategies[] = {{"load_balance", load_balance, true},
                                 {"lpt", lpt, true},
                                 {"round_robin", round_robin, false},
                                 {"rank0", rank0, false},
                                 {"xor_layout", xor_layout, false}};

const Entry& named(std::string_view name, std::string_view where) {
  return core::named(kStrategies, name, where, &Entry::name);
}

// Let q = floor(w/G) count the blocks of G matrices and g = w mod G be the column.
//
// The paper gives (w mod R) xor (q mod R), for 4 x 8. In a fixed column, w = qG + g.
// - If R is a power of two and G is even, the node visits all R values as q does. Bit i of qG + g
//   depends on lower bits of q only, so the xor with bit i of q can be undone from the lowest bit
//   up.
// - If G is odd, the lowest bit of q cancels and half of the slots are never used.
// - With any other R the xor leaves [0, R).
// A sum instead of the xor, (w + q) mod R, does not help. It is q(G + 1) + g, which skips slots if
// G + 1 and R share a divisor (3 x 8 puts each column on one node). (g + q) mod R visits all nodes
// on every mesh.
Owner layout_owner(int w, Mesh mesh) {
  const int num_replicates = mesh.num_replicates;
  const int block = w / mesh.num_shards;
  const int shard = w % mesh.num_shards;
  const bool power_of_two = (num_replicates & (num_replicates - 1)) == 0;
  const int replicate = power_of_two && mesh.num_shards % 2 == 0
                            ? (w % num_replicates) ^ (block % num_replicates)
                            : (shard + block % num_replicates) % num_replicates;
  return mesh.owner_at(Replicate(replicate), Shard(shard),
                       w / mesh.num_slots() % mesh.tensor_parallel);
}

}  // namespace

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kStrategies) names.emplace_back(entry.name);
  return names;
}

Strategy find_strategy(std::string_view name) {
  return named(name, "find_strategy: strategy must be").strategy;
}

bool reads_costs(std::string_view name) {
  return named(name, "reads_costs: strategy must be").reads_costs;
}

Decision lpt(const Problem& problem) {
  auto assignment = balance::longest_first(problem.balance, 1);
  if (!assignment) assignment = balance::fewest_bytes(problem.balance);
  core::require(assignment.has_value(),
                "lpt: max_memory_bytes must leave room for every matrix; got ",
                problem.options.max_memory_bytes);
  return {place(problem.inventory, problem.groups, *assignment, problem.mesh, problem.options)};
}

Decision round_robin(const Problem& problem) {
  Decision decision;
  for (const ParameterIndex w : problem.inventory.indices()) {
    decision.owner.push_back(Owner(w.value() % problem.mesh.num_owners()));
  }
  return decision;
}

Decision rank0(const Problem& problem) { return {PerParameter<Owner>(problem.inventory.size())}; }

Decision xor_layout(const Problem& problem) {
  Decision decision;
  for (const ParameterIndex w : problem.inventory.indices()) {
    decision.owner.push_back(layout_owner(w.value(), problem.mesh));
  }
  return decision;
}

}  // namespace dmuon::plan
