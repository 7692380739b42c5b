#include "tests/engine/mesh_engine.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <utility>

namespace dmuon::engine {

std::string name_of(const Mesh& mesh) {
  return std::to_string(mesh.num_replicates) + "x" + std::to_string(mesh.num_shards);
}

void PrintTo(const Mesh& mesh, std::ostream* out) { *out << name_of(mesh); }

std::vector<MatrixSpec> unbalanced_specs(const Mesh& mesh) {
  const int last = mesh.size() - 1;
  const auto slot = [&](int index) { return index % mesh.size(); };
  return {{3, 5, 0, slot(1)},  {7, 2, 0, slot(0)}, {3, 5, 0, last},
          {1, 1, 0, slot(2)},  {5, 3, 0, slot(3)}, {9, 4, 1, last},
          {2, 11, 2, slot(1)}, {3, 5, 2, slot(1)}, {1, 13, 2, slot(1)}};
}

std::vector<int> matrices_of(const std::vector<MatrixSpec>& specs, int unit) {
  std::vector<int> matrices;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].unit == unit) matrices.push_back(static_cast<int>(i));
  }
  return matrices;
}

std::unique_ptr<Engine> make_engine(const Setting& setting, const StorePtr& store, int rank) {
  const Mesh mesh = setting.mesh;
  Options options;
  options.num_replicates = mesh.num_replicates;
  options.num_shards = mesh.num_shards;
  options.replicate = rank / mesh.num_shards;
  options.shard = rank % mesh.num_shards;
  options.host_replicates = mesh.num_replicates;
  options.schedule = setting.schedule;
  options.schedule.node_copy = setting.node_copy;
  options.reshard_after_forward = setting.reshard_after_forward;

  const auto group = [&](const std::string& name, int member, int size) {
    return make_group(store, name, member, size, setting.timeout);
  };
  Groups groups{
      group("row" + std::to_string(options.replicate), options.shard, mesh.num_shards),
      group("column" + std::to_string(options.shard), options.replicate, mesh.num_replicates),
      group("order", rank, mesh.size()), group("verdict", rank, mesh.size())};

  std::vector<UnitSpec> units;
  for (int unit = 0; !matrices_of(setting.specs, unit).empty(); ++unit) {
    units.push_back({"unit " + std::to_string(unit), matrices_of(setting.specs, unit),
                     setting.compute_dtype, setting.reduce_dtype});
  }
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<int>> owned;
  for (std::size_t i = 0; i < setting.specs.size(); ++i) {
    const MatrixSpec& spec = setting.specs[i];
    if (spec.owner == rank) owned[{spec.rows, spec.cols}].push_back(static_cast<int>(i));
  }
  std::vector<std::vector<int>> batches;
  for (const auto& [shape, matrices] : owned) batches.push_back(matrices);
  return std::make_unique<Engine>(options, std::move(groups), setting.specs, units, batches);
}

at::Tensor integers(const MatrixSpec& spec, int seed) {
  at::Tensor values = at::empty({spec.rows, spec.cols}, at::TensorOptions().dtype(at::kFloat));
  auto* data = values.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < spec.num_elements(); ++i) {
    data[i] = static_cast<float>((seed * 37 + i * i * 11 + i * 5) % 251 - 125);
  }
  return values;
}

void set_masters(Engine& engine, int seed) {
  for (OwnedBatch& batch : engine.batches()) {
    for (std::size_t i = 0; i < batch.matrices.size(); ++i) {
      const int matrix = batch.matrices[i];
      const MatrixSpec& spec = engine.specs()[static_cast<std::size_t>(matrix)];
      batch.master[static_cast<std::int64_t>(i)].copy_(integers(spec, seed + matrix));
    }
  }
}

at::Tensor owned_gradient(Engine& engine, int matrix) {
  const Place place = engine.place(matrix);
  if (place.batch < 0) return {};
  OwnedBatch& batch = engine.batches()[static_cast<std::size_t>(place.batch)];
  if (!batch.filled[place.index]) return {};
  return batch.gradient[static_cast<std::int64_t>(place.index)];
}

at::Tensor weight_at(Engine& engine, int unit, std::size_t place) {
  return engine.unit(unit).views()[place].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

testing::AssertionResult same_values(const at::Tensor& got, const at::Tensor& expected) {
  if (!got.defined()) return testing::AssertionFailure() << "got an undefined tensor";
  if (got.sizes() != expected.sizes()) {
    return testing::AssertionFailure()
           << "got " << got.sizes() << ", expected " << expected.sizes();
  }
  if (got.equal(expected)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "got\n" << got << "\nexpected\n" << expected;
}

std::int64_t pieces_of(std::int64_t size, std::int64_t room, int num_peers) {
  if (size == 0) return 0;
  std::int64_t pieces = 1;
  while ((size + pieces - 1) / pieces * num_peers > std::max<std::int64_t>(room, num_peers))
    ++pieces;
  return pieces;
}

}  // namespace dmuon::engine
