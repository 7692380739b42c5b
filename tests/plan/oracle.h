#pragma once

#include <vector>

#include "dmuon/plan/inventory.h"

namespace dmuon::plan::oracle {

/// c[s][b - 1], seconds of one batch of b matrices of shape s.
using Costs = std::vector<std::vector<double>>;

/// The cheapest of all ways to split k matrices into batches, by enumeration.
double cheapest_split(const std::vector<double>& batch_seconds, int k);

/// The slowest slot's seconds under the given owners, every slot batching at its best.
double makespan(const std::vector<int>& shape_of, const Costs& costs, const std::vector<int>& owner,
                int num_slots);

/// The smallest makespan of all num_slots^n assignments.
double optimum(const std::vector<int>& shape_of, const Costs& costs, int num_slots);

/// One matrix per entry, shape s being (s + 1) x (s + 1), two matrices a unit.
Inventory inventory(const std::vector<int>& shape_of);

/// The matrices of a Qwen2.5-7B, fused projections apart, one unit a layer: 28 * 7.
Inventory qwen_7b(int num_layers = 28);

}  // namespace dmuon::plan::oracle
