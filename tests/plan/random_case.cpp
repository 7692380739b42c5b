#include "tests/plan/random_case.h"

#include <algorithm>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

Inventory draw_inventory(balance::Random& random, bool tensor_parallel) {
  const int num_shapes = draw(random, 1, 5);
  const bool interleaved = draw(random, 0, 4) == 0;
  Inventory inventory;
  const int num_units = draw(random, 1, 15);
  for (int unit = 0; unit < num_units; ++unit) {
    const int num_matrices = draw(random, 1, 6);
    for (int i = 0; i < num_matrices && inventory.size() < 60; ++i) {
      const int shape = draw(random, 1, num_shapes);
      const int of_unit = interleaved ? draw(random, 0, num_units - 1) : unit;
      inventory.push_back({core::message("u", unit, ".", i),
                           {/*num_matrices=*/draw(random, 0, 5) == 0 ? 3 : 1, 16 * shape,
                            8 * (num_shapes - shape + 1)},
                           of_unit,
                           tensor_parallel && shape % 2 == 1});
    }
  }
  return inventory;
}

CostTable draw_costs(balance::Random& random, const ShapeGroups& groups) {
  CostTable costs{"drawn", {}};
  for (const Shape& shape : groups.shapes) {
    ShapeCosts entry{shape, {}};
    const int one = draw(random, 0, 1000);
    const int fixed = draw(random, 0, 1000);
    for (int size = 1; size <= 8; ++size) {
      if (size > 1 && draw(random, 0, 2) == 0) continue;
      entry.batches.push_back({size, fixed + size * one});
    }
    costs.shapes.push_back(std::move(entry));
  }
  return costs;
}

}  // namespace

Mesh draw_mesh(balance::Random& random) {
  switch (draw(random, 0, 4)) {
    case 0:
      return {1, draw(random, 1, 9)};
    case 1:
      return {draw(random, 1, 9), 1};
    case 2:
      return {3, 5};
    case 3:
      return {draw(random, 1, 3), draw(random, 1, 4), draw(random, 2, 3)};
    default:
      return {draw(random, 1, 4), draw(random, 1, 8)};
  }
}

Case draw_case(balance::Random& random) {
  Case drawn;
  drawn.mesh = draw_mesh(random);
  drawn.inventory = draw_inventory(random, drawn.mesh.tensor_parallel > 1);
  drawn.costs = draw_costs(random, group_by_shape(drawn.inventory));
  drawn.options.lookahead = draw(random, 0, 5);
  drawn.options.layout_slack = 0.02 * draw(random, 0, 5);
  drawn.options.node_copy = draw(random, 0, 1) == 0;
  drawn.options.max_units_in_flight = draw(random, 0, 1) * draw(random, 2, 6);
  drawn.options.on_cpu = draw(random, 0, 1) == 0;
  return drawn;
}

}  // namespace dmuon::plan
