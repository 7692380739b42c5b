#include "dmuon/plan/strategy.h"

namespace dmuon::plan::strategies {

// One after the other, whatever they cost. For ablation.
Owners round_robin(const Problem& problem) {
  Owners owners;
  const auto num_owners = static_cast<std::size_t>(problem.mesh.num_owners());
  for (std::size_t w = 0; w < problem.inventory.size(); ++w) {
    owners.owner.push_back(static_cast<int>(w % num_owners));
  }
  return owners;
}

}  // namespace dmuon::plan::strategies
