#include "dmuon/plan/wire_time.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "dmuon/core/error.h"
#include "dmuon/layout/packed_size.h"
#include "dmuon/plan/packed_units.h"

namespace dmuon::plan {
namespace {

// Bytes of weights in the busier direction of the busiest node, of all its adapters.
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
    carried.published += busiest_direction(received, most, num_replicates, true);
    carried.routed += busiest_direction(received, most, num_replicates, false);
  }
  return carried;
}

// Columns go through their units by themselves.
Carried by_rings(const Plan& plan) {
  const schedule::Layout layout =
      pack_units(plan.inventory, plan.mesh, plan.owner, plan.options).layout;
  double busiest = 0;
  for (const Shard column : layout.shards()) {
    double carried = 0;
    for (const schedule::UnitLayout& unit : layout.units) {
      std::vector<double> parts;
      for (const Replicate node : layout.replicates())
        parts.push_back(static_cast<double>(unit.owner_elements[layout.slot_at(node, column)]));
      carried += most_received(parts);
    }
    busiest = std::max(busiest, carried);
  }
  const double bytes = busiest * plan.mesh.num_shards * plan.options.weight_bytes;
  return {bytes, bytes};
}

}  // namespace

double most_received(const std::vector<double>& parts) {
  return std::accumulate(parts.begin(), parts.end(), 0.0) -
         *std::min_element(parts.begin(), parts.end());
}

double busiest_direction(double received, double most, int num_members, bool publishes) {
  const int num_peers = num_members - 1;
  const bool down_tree = publishes && num_members > layout::kMostDirect;
  const int num_copies =
      down_tree ? static_cast<int>(std::bit_width(static_cast<unsigned>(num_peers))) : num_peers;
  return std::max(received, most * num_copies);
}

WireTime wire_time(const Plan& plan, double bytes_per_s) {
  core::require(std::isfinite(bytes_per_s) && bytes_per_s > 0,
                "wire_time: bytes_per_s must be > 0 and finite; got ", bytes_per_s);
  const int num_replicates = plan.mesh.num_replicates;
  if (num_replicates == 1) return {};
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
