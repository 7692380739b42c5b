#pragma once

#include <vector>

#include "dmuon/layout/mesh.h"
#include "dmuon/plan/cost.h"
#include "dmuon/plan/inventory.h"
#include "dmuon/plan/options.h"
#include "tests/balance/random.h"

namespace dmuon::plan {

/// Something to plan.
struct Case {
  Inventory inventory;
  Mesh mesh;
  CostTable costs;
  PlanOptions options;
};

/// In [first, last], the same on every machine.
inline int draw(balance::Random& random, int first, int last) {
  return first + random.below(last - first + 1);
}

/// One of 1 x G, R x 1, 3 x 5, and others with up to 32 slots; some with 2 or 3 ranks a slot.
Mesh draw_mesh(balance::Random& random);

/// Up to 60 matrices of up to 5 shapes in units of 1 to 6, which are not in order everywhere, whose
/// batches save time or do not; any lookahead and slack.
Case draw_case(balance::Random& random);

}  // namespace dmuon::plan
