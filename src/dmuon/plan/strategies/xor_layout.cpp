#include "dmuon/plan/layout.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan::strategies {

// Every matrix at its ideal slot (eq:comm-layout), whatever it costs: the best for communication.
// For ablation.
Owners xor_layout(const Problem& problem) {
  const Mesh mesh = problem.mesh;
  Owners owners;
  for (std::size_t w = 0; w < problem.inventory.size(); ++w) {
    const auto place = static_cast<std::int64_t>(w);
    const auto member = static_cast<int>(place / mesh.num_slots() % mesh.tensor_parallel);
    owners.owner.push_back(owner_index(layout_slot(place, mesh), member, mesh));
  }
  return owners;
}

}  // namespace dmuon::plan::strategies
