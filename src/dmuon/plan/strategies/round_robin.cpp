#include "dmuon/plan/layout.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan::strategies {

// Every matrix at its ideal slot, whatever it costs: the best for communication, for ablation.
std::vector<int> round_robin(const Problem& problem) {
  std::vector<int> owner;
  owner.reserve(problem.inventory.size());
  for (std::size_t w = 0; w < problem.inventory.size(); ++w) {
    owner.push_back(
        slot_index(layout_slot(static_cast<std::int64_t>(w), problem.mesh), problem.mesh));
  }
  return owner;
}

}  // namespace dmuon::plan::strategies
