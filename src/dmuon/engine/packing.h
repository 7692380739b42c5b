#pragma once

#include <cstdint>
#include <vector>

namespace dmuon::engine {

/// A matrix as the engine knows it; indexed by its place in module order.
struct MatrixSpec {
  std::int64_t rows;
  std::int64_t cols;
  int unit;   ///< index of its unit
  int owner;  ///< slot of its owner: replicate * num_shards + shard
  std::int64_t num_elements() const { return rows * cols; }
};

/// Elements [begin, end) of a packed buffer.
struct Segment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

/// Where a unit's matrices lie in its packed buffers. Matrices are sorted by (column, owner,
/// index), so that all of a column travel as one message inside a node, and all of an owner as one
/// message between nodes. No padding: what travels is weights alone.
struct Packing {
  std::vector<int> matrices;          ///< global indices, in packed order
  std::vector<std::int64_t> offsets;  ///< [matrices] first element
  std::vector<Segment> columns;       ///< [num_shards] what each column's member of a node holds
  std::vector<Segment> owners;  ///< [slots] what each owner holds; owners of a column are adjacent
  std::int64_t num_elements = 0;
};

/// @param matrices  indices into `specs` of one unit's matrices, ascending.
Packing pack(const std::vector<MatrixSpec>& specs, const std::vector<int>& matrices,
             int num_replicates, int num_shards);

}  // namespace dmuon::engine
