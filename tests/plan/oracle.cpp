#include "tests/plan/oracle.h"

#include <algorithm>
#include <limits>

#include "dmuon/core/error.h"
#include "dmuon/plan/division.h"

namespace dmuon::plan::oracle {

Nanoseconds cheapest_split(const std::vector<Nanoseconds>& batch_ns, int k) {
  if (k == 0) return 0;
  Nanoseconds best = std::numeric_limits<Nanoseconds>::max();
  for (int b = 1; b <= std::min(k, static_cast<int>(batch_ns.size())); ++b) {
    best =
        std::min(best, batch_ns[static_cast<std::size_t>(b - 1)] + cheapest_split(batch_ns, k - b));
  }
  return best;
}

Nanoseconds makespan(const std::vector<int>& shape_of, const Costs& costs,
                     const PerParameter<Owner>& owner, int num_owners) {
  Nanoseconds slowest = 0;
  for (int o = 0; o < num_owners; ++o) {
    Nanoseconds load = 0;
    for (int s = 0; s < static_cast<int>(costs.size()); ++s) {
      int k = 0;
      for (const ParameterIndex w : owner.indices()) {
        k += owner[w] == Owner(o) && shape_of[w.position()] == s;
      }
      load += cheapest_split(costs[static_cast<std::size_t>(s)], k);
    }
    slowest = std::max(slowest, load);
  }
  return slowest;
}

Nanoseconds optimum(const std::vector<int>& shape_of, const Costs& costs, int num_owners) {
  Nanoseconds best = std::numeric_limits<Nanoseconds>::max();
  std::vector<int> owner(shape_of.size(), 0);
  while (true) {
    best = std::min(best, makespan(shape_of, costs, owners(owner), num_owners));
    std::size_t digit = 0;
    while (digit < owner.size() && ++owner[digit] == num_owners) owner[digit++] = 0;
    if (digit == owner.size()) return best;
  }
}

Inventory divide_small(const Inventory& inventory, Mesh mesh) { return divide(inventory, mesh, 1); }

Inventory inventory(const std::vector<int>& shape_of) {
  Inventory matrices;
  for (std::size_t w = 0; w < shape_of.size(); ++w) {
    const std::int64_t side = shape_of[w] + 1;
    matrices.push_back({core::message("m", w), {1, side, side}, static_cast<int>(w / 2)});
  }
  return matrices;
}

CostTable table(const Costs& costs) {
  CostTable table{"by hand", {}};
  for (const std::vector<Nanoseconds>& batch_ns : costs) {
    const auto side = static_cast<std::int64_t>(table.shapes.size()) + 1;
    ShapeCosts entry{{side, side}, {}};
    for (const Nanoseconds ns : batch_ns) {
      entry.batches.push_back({static_cast<int>(entry.batches.size()) + 1, ns});
    }
    table.shapes.push_back(std::move(entry));
  }
  return table;
}

PerParameter<Owner> owners(const std::vector<int>& numbers) {
  PerParameter<Owner> all;
  for (const int number : numbers) all.emplace_back(number);
  return all;
}

Batch batch(int owner, const std::vector<int>& parameters) {
  Batch made{Owner(owner), {}};
  for (const int parameter : parameters) made.parameters.emplace_back(parameter);
  return made;
}

Inventory qwen_7b(int num_layers) {
  const Shape shapes[] = {{3584, 3584},  {512, 3584},   {512, 3584},  {3584, 3584},
                          {18944, 3584}, {18944, 3584}, {3584, 18944}};
  Inventory matrices;
  for (int layer = 0; layer < num_layers; ++layer) {
    int index = 0;
    for (const Shape& shape : shapes) {
      const std::string name = core::message(layer, ".", index++);
      matrices.push_back({name, {1, shape.rows, shape.cols}, layer});
    }
  }
  return matrices;
}

Device a800() { return {"a800", "", "", 195, 217, 1600, 5, 108, 150, 156, 85.9, ""}; }

CostTable modelled(const Inventory& inventory, int tensor_parallel) {
  return modelled_costs(group_by_shape(inventory), a800(), tensor_parallel);
}

}  // namespace dmuon::plan::oracle
