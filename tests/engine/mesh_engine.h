#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "dmuon/engine/engine.h"
#include "tests/engine/rank_threads.h"

namespace dmuon::engine {

struct Mesh {
  int num_replicates;
  int num_shards;
  int size() const { return num_replicates * num_shards; }
};

/// For messages and for names of tests, "2x2".
void PrintTo(const Mesh& mesh, std::ostream* out);
std::string name_of(const Mesh& mesh);

/// What the engines of all ranks are made of.
struct Setting {
  Mesh mesh;
  std::vector<MatrixSpec> specs;
  at::ScalarType compute_dtype = at::kFloat;
  at::ScalarType reduce_dtype = at::kFloat;
  bool node_copy = true;  ///< overrides the schedule's
  schedule::Options schedule;
  bool reshard_after_forward = true;
  std::chrono::milliseconds timeout = kTimeout;
};

/// Nine odd-sized matrices in three units, with owners drawn so that on meshes of more than one
/// rank some columns are empty: unit 0 has one of everything, unit 1 one matrix alone, unit 2 lies
/// at one owner.
std::vector<MatrixSpec> unbalanced_specs(const Mesh& mesh);

/// One rank's engine; blocks until all ranks have come.
std::unique_ptr<Engine> make_engine(const Setting& setting, const StorePtr& store, int rank);

/// The indices of a unit's matrices, ascending.
std::vector<int> matrices_of(const std::vector<MatrixSpec>& specs, int unit);

/// [rows, cols] fp32 integers of at most 8 bits, so exact in every dtype; different for each seed.
at::Tensor integers(const MatrixSpec& spec, int seed);

/// This rank's owned masters become `integers(spec, seed + matrix)`.
void set_masters(Engine& engine, int seed);

/// The owned accumulator of a matrix; undefined elsewhere, and where nothing is held.
at::Tensor owned_gradient(Engine& engine, int matrix);

/// The unit's weights, by place in its packing, as an fp32 copy.
at::Tensor weight_at(Engine& engine, int unit, std::size_t place);

/// Whether shapes and all values are equal; NaN equals nothing.
testing::AssertionResult same_values(const at::Tensor& got, const at::Tensor& expected);

/// In how many messages a gradient of `size` elements comes from each peer, so that one of each
/// fits into `room`, at least one element of each.
std::int64_t pieces_of(std::int64_t size, std::int64_t room, int num_peers);

}  // namespace dmuon::engine
