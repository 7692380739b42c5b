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

}  // namespace

WireTime wire_time(const Plan& plan, double bytes_per_s) {
  core::require(std::isfinite(bytes_per_s) && bytes_per_s > 0,
                "wire_time: bytes_per_s must be > 0 and finite; got ", bytes_per_s);
  const int num_replicates = plan.mesh.num_replicates;
  if (num_replicates == 1) return {};
  double published = 0;  // bytes at the busiest node
  double routed = 0;
  double all = 0;
  for (const UnitSpread& unit : plan.spread.units) {
    const auto received = static_cast<double>(unit.bytes - unit.least_of_node);
    const auto most = static_cast<double>(unit.most_of_node);
    published += std::max(received, most * num_copies(num_replicates, false));
    routed += std::max(received, most * num_copies(num_replicates, plan.options.on_cpu));
    all += static_cast<double>(unit.bytes);
  }
  const PlanOptions& options = plan.options;
  const int num_publications = !options.node_copy && options.reshard_after_forward ? 2 : 1;
  const double gradient_share = static_cast<double>(options.gradient_bytes) / options.weight_bytes;
  const double ms_per_byte = 1e3 / bytes_per_s;
  const double even = all * (num_replicates - 1) / num_replicates;
  return {published * num_publications * ms_per_byte, routed * gradient_share * ms_per_byte,
          even * (num_publications + gradient_share) * ms_per_byte};
}

}  // namespace dmuon::plan
