#pragma once

#include <vector>

#include "dmuon/plan/cost.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/plan.h"

namespace dmuon::plan::oracle {

/// c[s][b - 1], nanoseconds of one batch of b matrices of shape s.
using Costs = std::vector<std::vector<Nanoseconds>>;

/// The cheapest of all ways to split k matrices into batches, by enumeration.
Nanoseconds cheapest_split(const std::vector<Nanoseconds>& batch_ns, int k);

/// The slowest owner's time, every owner batching at its best.
Nanoseconds makespan(const std::vector<int>& shape_of, const Costs& costs,
                     const PerParameter<Owner>& owner, int num_owners);

/// The smallest makespan of all num_owners^n assignments.
Nanoseconds optimum(const std::vector<int>& shape_of, const Costs& costs, int num_owners);

/// divide(), however small parts get.
Inventory divide_small(const Inventory& inventory, Mesh mesh);

/// One matrix per entry, shape s being (s + 1) x (s + 1), two matrices a unit.
Inventory inventory(const std::vector<int>& shape_of);

/// The table that says so of inventory()'s shapes.
CostTable table(const Costs& costs);

/// By number.
PerParameter<Owner> owners(const std::vector<int>& numbers);
Batch batch(int owner, const std::vector<int>& parameters);

/// The matrices of a Qwen2.5-7B, fused projections apart, one unit a layer: 28 * 7.
Inventory qwen_7b(int num_layers = 28);

/// The constants of models/devices.json's a800-sxm4-80gb.
Device a800();

/// Modelled costs on it.
CostTable modelled(const Inventory& inventory, int tensor_parallel = 1);

}  // namespace dmuon::plan::oracle
