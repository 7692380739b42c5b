#include "dmuon/plan/wire_time.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

// As wire/group.cpp: up to so many members a root sends to each of them itself.
constexpr int kMostDirect = 4;

// Returns how often an owner sends its part, or receives that of others, in a message to all nodes.
int num_copies(int num_replicates, bool direct) {
  if (direct || num_replicates <= kMostDirect) return num_replicates - 1;
  return static_cast<int>(std::bit_width(static_cast<unsigned>(num_replicates - 1)));
}

// Bytes that are published and routed, as the node's network carries them: in the busier direction
// of the busiest node.
struct Carried {
  double published = 0;
  double routed = 0;
};

// Owners send their parts to members, all columns through one adapter.
Carried by_members(const Plan& plan) {
  Carried carried;
  const int num_replicates = plan.mesh.num_replicates;
  for (const UnitSpread& unit : plan.spread.units) {
    const auto received = static_cast<double>(unit.bytes - unit.least_of_node);
    const auto most = static_cast<double>(unit.most_of_node);
    carried.published += std::max(received, most * num_copies(num_replicates, /*direct=*/false));
    carried.routed += std::max(received, most * num_copies(num_replicates, /*direct=*/true));
  }
  return carried;
}

// A ring passes every byte through every member but one. Each column has adapters of its own, an
// equal part of the node's network, and goes through its units by itself.
Carried by_rings(const Plan& plan) {
  const Mesh mesh = plan.mesh;
  core::PerShard<double> columns(mesh.num_shards);
  for (const auto& unit : group_by_unit(plan.inventory)) {
    core::Vector<Slot, std::int64_t> bytes(mesh.num_slots());
    for (const ParameterIndex w : unit)
      bytes[mesh.slot_of(plan.owner[w])] +=
          plan.inventory[w].num_elements() * plan.options.weight_bytes;
    for (const Shard column : mesh.shards()) {
      std::int64_t all = 0;
      std::int64_t least = bytes[mesh.slot_at(Replicate(0), column)];
      for (const Replicate node : mesh.replicates()) {
        const std::int64_t own = bytes[mesh.slot_at(node, column)];
        all += own;
        least = std::min(least, own);
      }
      columns[column] += static_cast<double>(all - least);
    }
  }
  const double busiest = *std::max_element(columns.begin(), columns.end()) * mesh.num_shards;
  return {busiest, busiest};
}

}  // namespace

WireTime wire_time(const Plan& plan, double bytes_per_s) {
  core::require(std::isfinite(bytes_per_s) && bytes_per_s > 0,
                "wire_time: bytes_per_s must be > 0 and finite; got ", bytes_per_s);
  const int num_replicates = plan.mesh.num_replicates;
  if (num_replicates == 1 || plan.inventory.empty()) return {};
  const Carried carried = plan.options.on_cpu ? by_members(plan) : by_rings(plan);
  double all = 0;
  for (const UnitSpread& unit : plan.spread.units) all += static_cast<double>(unit.bytes);
  const PlanOptions& options = plan.options;
  const int num_publications = !options.node_copy && options.reshard_after_forward ? 2 : 1;
  const double gradient_share = static_cast<double>(options.gradient_bytes) / options.weight_bytes;
  const double ms_per_byte = 1e3 / bytes_per_s;
  const double even = all * (num_replicates - 1) / num_replicates;
  return {carried.published * num_publications * ms_per_byte,
          carried.routed * gradient_share * ms_per_byte,
          even * (num_publications + gradient_share) * ms_per_byte};
}

}  // namespace dmuon::plan
