#include "dmuon/plan/strategy.h"

namespace dmuon::plan::strategies {

// Everything on one slot: the worst case, for ablation.
std::vector<int> rank0(const Problem& problem) {
  return std::vector<int>(problem.inventory.size(), 0);
}

}  // namespace dmuon::plan::strategies
