#pragma once

#include "dmuon/balance/instance.h"
#include "tests/balance/random.h"

namespace dmuon::balance {

/// In [first, last], the same on every machine.
inline int draw(Random& random, int first, int last) {
  return first + random.below(last - first + 1);
}

/// A shape with any batch sizes up to 8, whose times are one of: unrelated to each other, so not
/// monotone; less a matrix the larger the batch; all equal; all zero; of about 2^40 ns.
CostedShape draw_shape(Random& random, int num_matrices);

/// At most `max_matrices` matrices of at most 4 shapes, some of which may have none, and at most
/// `max_owners` owners: small enough for brute force.
Instance draw_small(Random& random, int max_matrices, int max_owners);

/// As models have them: 2 to 5 shapes, each of 1 to `most_each` matrices, whose batches save time,
/// and 2 to `max_owners` owners.
Instance draw_model(Random& random, int most_each, int max_owners);

}  // namespace dmuon::balance
