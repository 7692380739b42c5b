#include "dmuon/plan/strategy.h"

namespace dmuon::plan::strategies {

// Everything on one owner: the worst case, for ablation.
Owners rank0(const Problem& problem) { return {std::vector<int>(problem.inventory.size(), 0)}; }

}  // namespace dmuon::plan::strategies
