#include "tests/plan/oracle.h"

#include <algorithm>
#include <limits>

#include "dmuon/core/error.h"

namespace dmuon::plan::oracle {

double cheapest_split(const std::vector<double>& batch_seconds, int k) {
  if (k == 0) return 0;
  double best = std::numeric_limits<double>::infinity();
  for (int b = 1; b <= std::min(k, static_cast<int>(batch_seconds.size())); ++b) {
    best = std::min(best, batch_seconds[b - 1] + cheapest_split(batch_seconds, k - b));
  }
  return best;
}

double makespan(const std::vector<int>& shape_of, const Costs& costs, const std::vector<int>& owner,
                int num_slots) {
  double slowest = 0;
  for (int t = 0; t < num_slots; ++t) {
    double seconds = 0;
    for (int s = 0; s < static_cast<int>(costs.size()); ++s) {
      int k = 0;
      for (std::size_t w = 0; w < owner.size(); ++w) k += owner[w] == t && shape_of[w] == s;
      seconds += cheapest_split(costs[s], k);
    }
    slowest = std::max(slowest, seconds);
  }
  return slowest;
}

double optimum(const std::vector<int>& shape_of, const Costs& costs, int num_slots) {
  double best = std::numeric_limits<double>::infinity();
  std::vector<int> owner(shape_of.size(), 0);
  while (true) {
    best = std::min(best, makespan(shape_of, costs, owner, num_slots));
    std::size_t digit = 0;
    while (digit < owner.size() && ++owner[digit] == num_slots) owner[digit++] = 0;
    if (digit == owner.size()) return best;
  }
}

Inventory inventory(const std::vector<int>& shape_of) {
  Inventory matrices;
  for (std::size_t w = 0; w < shape_of.size(); ++w) {
    const std::int64_t side = shape_of[w] + 1;
    matrices.push_back({core::message("m", w), side, side, static_cast<int>(w / 2)});
  }
  return matrices;
}

Inventory qwen_7b(int num_layers) {
  const Shape shapes[] = {{3584, 3584},  {512, 3584},   {512, 3584},  {3584, 3584},
                          {18944, 3584}, {18944, 3584}, {3584, 18944}};
  Inventory matrices;
  for (int layer = 0; layer < num_layers; ++layer) {
    int index = 0;
    for (const Shape& shape : shapes) {
      const std::string name = core::message(layer, ".", index++);
      matrices.push_back({name, shape.rows, shape.cols, layer});
    }
  }
  return matrices;
}

}  // namespace dmuon::plan::oracle
