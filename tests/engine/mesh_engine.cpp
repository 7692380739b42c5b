#include "tests/engine/mesh_engine.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace dmuon::engine {

std::string mesh_name(const Mesh& mesh) {
  return std::to_string(mesh.num_replicates) + "x" + std::to_string(mesh.num_shards);
}

layout::Parameters unbalanced_parameters(const Mesh& mesh) {
  layout::Parameters parameters;
  const auto name = [&] { return "weight " + std::to_string(parameters.size()); };
  const auto add = [&](std::int64_t rows, std::int64_t cols, int unit, int owner) {
    parameters.push_back({{name(), {1, rows, cols}, unit}, core::Slot(owner % mesh.num_slots())});
  };
  const int last = mesh.num_slots() - 1;
  add(3, 5, 0, 1);
  add(7, 2, 0, 0);
  add(3, 5, 0, last);
  add(1, 1, 0, 2);
  add(5, 3, 0, 3);
  add(9, 4, 1, last);
  add(2, 11, 2, 1);
  add(3, 5, 2, 1);
  add(1, 13, 2, 1);
  parameters.push_back({{name(), {2, 3, 5}, 2}, core::Slot(1 % mesh.num_slots())});
  add(2, 5, 0, 2);
  for (const int owner : {0, last}) {
    add(3, 5, 0, owner);
    parameters.back().continues = true;
  }
  return parameters;
}

Setting setting_on(Mesh mesh) {
  Setting setting;
  setting.mesh = mesh;
  setting.parameters = unbalanced_parameters(mesh);
  return setting;
}

at::Tensor leaf_of(const Engine& engine, LeafIndex leaf,
                   const std::function<at::Tensor(ParameterIndex)>& values) {
  std::vector<at::Tensor> parts;
  for (const ParameterIndex part : engine.leaves()[leaf].parameters)
    parts.push_back(values(part).reshape({-1}));
  return at::cat(parts).view(engine.leaves()[leaf].sizes);
}

void put_gradients(Engine& engine, UnitIndex unit,
                   const std::function<at::Tensor(ParameterIndex)>& values) {
  for (const LeafIndex leaf : engine.leaves().indices()) {
    if (engine.leaves()[leaf].unit == unit)
      engine.put_gradient(leaf, leaf_of(engine, leaf, values));
  }
}

std::vector<ParameterIndex> parameters_of(const layout::Parameters& parameters, UnitIndex unit) {
  std::vector<ParameterIndex> found;
  for (const ParameterIndex parameter : parameters.indices()) {
    if (parameters[parameter].unit_index() == unit) found.push_back(parameter);
  }
  return found;
}

plan::Plan plan_of(const layout::Parameters& parameters, const Mesh& mesh) {
  plan::Plan plan;
  plan.mesh = mesh;
  std::map<std::tuple<core::Owner, std::int64_t, std::int64_t>, std::vector<ParameterIndex>>
      batches;
  for (const ParameterIndex index : parameters.indices()) {
    const layout::OwnedParameter& parameter = parameters[index];
    const layout::View& view = parameter.view;
    plan.inventory.push_back(parameter);
    plan.owner.push_back(core::Owner(parameter.owner.value()));
    batches[{plan.owner.back(), view.rows, view.cols}].push_back(index);
  }
  for (const auto& [key, batch] : batches) plan.batches.push_back({std::get<0>(key), batch});
  return plan;
}

wire::SharedMesh make_mesh(const Setting& setting, const wire::StorePtr& store, int rank) {
  return wire::make_mesh(setting.mesh, store, rank, setting.timeout);
}

std::vector<UnitSpec> unit_specs(const Setting& setting) {
  std::vector<UnitSpec> units;
  for (const layout::OwnedParameter& parameter : setting.parameters) {
    while (parameter.unit >= static_cast<int>(units.size())) {
      const UnitIndex unit(static_cast<int>(units.size()));
      units.push_back({"unit " + std::to_string(units.size()), setting.compute_dtype,
                       setting.reduce_dtype, setting.host_units.contains(unit)});
    }
  }
  return units;
}

std::unique_ptr<Engine> make_engine(const Setting& setting, const wire::StorePtr& store, int rank) {
  EngineOptions options;
  options.host_replicates = setting.mesh.num_replicates;
  options.step = setting.step;

  return std::make_unique<Engine>(options, make_mesh(setting, store, rank),
                                  plan_of(setting.parameters, setting.mesh), unit_specs(setting));
}

at::Tensor integers(const layout::OwnedParameter& parameter, int seed) {
  at::Tensor values = at::empty(parameter.view.sizes(), at::TensorOptions().dtype(at::kFloat));
  auto* data = values.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < parameter.num_elements(); ++i) {
    data[i] = static_cast<float>((seed * 37 + i * i * 11 + i * 5) % 251 - 125);
  }
  return values;
}

void set_masters(Engine& engine, int seed) {
  for (const LeafIndex leaf : engine.leaves().indices())
    engine.transfers().scatter(
        leaf, wire::kMaster, leaf_of(engine, leaf, [&](ParameterIndex parameter) {
          return integers(engine.parameters()[parameter], seed + parameter.value());
        }));
}

at::Tensor owned_gradient(Engine& engine, ParameterIndex parameter) {
  if (!engine.owned().filled(parameter)) return {};
  return engine.owned().of(parameter, wire::kGradient);
}

at::Tensor weight_of(Engine& engine, ParameterIndex parameter) {
  Unit& unit = engine.unit(engine.parameters()[parameter].unit_index());
  const layout::Segment part =
      std::ranges::find(unit.packing().parameters, parameter, &layout::PackedParameter::index)
          ->in_unit;
  return unit.weights()
      .slice(part.begin, part.end)
      .view(engine.parameters()[parameter].view.sizes())
      .to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
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

}  // namespace dmuon::engine
