#include "dmuon/engine/packing.h"

#include <algorithm>
#include <tuple>

namespace dmuon::engine {

Packing pack(const std::vector<MatrixSpec>& specs, const std::vector<int>& matrices,
             int num_replicates, int num_shards) {
  Packing packing;
  packing.matrices = matrices;
  const auto key = [&](int index) {
    const int owner = specs[static_cast<std::size_t>(index)].owner;
    return std::tuple(owner % num_shards, owner / num_shards, index);
  };
  std::sort(packing.matrices.begin(), packing.matrices.end(),
            [&](int a, int b) { return key(a) < key(b); });
  packing.columns.resize(static_cast<std::size_t>(num_shards));
  packing.owners.resize(static_cast<std::size_t>(num_shards) *
                        static_cast<std::size_t>(num_replicates));

  std::size_t next = 0;
  std::int64_t offset = 0;
  for (int column = 0; column < num_shards; ++column) {
    Segment& segment = packing.columns[static_cast<std::size_t>(column)];
    segment.begin = offset;
    for (int replicate = 0; replicate < num_replicates; ++replicate) {
      const int slot = replicate * num_shards + column;
      Segment& owned = packing.owners[static_cast<std::size_t>(slot)];
      owned.begin = offset;
      for (; next < packing.matrices.size(); ++next) {
        const MatrixSpec& spec = specs[static_cast<std::size_t>(packing.matrices[next])];
        if (spec.owner != slot) break;
        packing.offsets.push_back(offset);
        offset += spec.num_elements();
      }
      owned.end = offset;
    }
    segment.end = offset;
  }
  packing.num_elements = offset;
  return packing;
}

}  // namespace dmuon::engine
