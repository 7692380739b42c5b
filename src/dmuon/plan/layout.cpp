#include "dmuon/plan/layout.h"

namespace dmuon::plan {

// Let q = floor(w/G) count the blocks of G matrices and g = w mod G be the column.
//
// The paper gives (w mod R) xor (q mod R), for 4 x 8. In a fixed column, w = qG + g, and the node
// visits all R values as q does if R is a power of two and G is even: bit i of qG + g then depends
// on lower bits of q only, so the xor with bit i of q can be undone from the lowest bit up. With G
// odd the lowest bit of q cancels and half of the slots are never used; with any other R the xor
// leaves [0, R). Replacing the xor by a sum, (w + q) mod R, does not mend this: it is q(G + 1) + g,
// which skips slots whenever G + 1 and R share a divisor (3 x 8 puts each column on one node). (g +
// q) mod R visits all nodes on every mesh.
Slot layout_slot(std::int64_t w, Mesh mesh) {
  validate(mesh);
  core::require(w >= 0, "layout_slot: w must be >= 0; got ", w);
  const std::int64_t num_replicates = mesh.num_replicates;
  const std::int64_t block = w / mesh.num_shards;
  const std::int64_t shard = w % mesh.num_shards;
  const bool power_of_two = (num_replicates & (num_replicates - 1)) == 0;
  const std::int64_t replicate = power_of_two && mesh.num_shards % 2 == 0
                                     ? (w % num_replicates) ^ (block % num_replicates)
                                     : (shard + block) % num_replicates;
  return {static_cast<int>(replicate), static_cast<int>(shard)};
}

}  // namespace dmuon::plan
