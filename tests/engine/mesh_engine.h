#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "dmuon/engine/engine.h"
#include "tests/wire/groups.h"
#include "tests/wire/pieces.h"

namespace dmuon::engine {

using core::LeafIndex;
using core::ParameterIndex;
using core::UnitIndex;

using layout::Mesh;

/// For names of tests, "2x2".
std::string mesh_name(const Mesh& mesh);

/// What the engines of all ranks are made of.
struct Setting {
  Mesh mesh;
  layout::Parameters parameters;
  at::ScalarType compute_dtype = at::kFloat;
  at::ScalarType reduce_dtype = at::kFloat;
  schedule::StepOptions step;
  std::set<UnitIndex> host_units;
  std::chrono::milliseconds timeout = wire::kTimeout;
};

/// Thirteen odd-sized parameters, one a stack of two matrices and the last three of one leaf, in
/// three units, with owners drawn so that on meshes of more than one rank some columns are empty:
/// unit 0 has one of everything, unit 1 one parameter alone, unit 2 lies at one owner.
layout::Parameters unbalanced_parameters(const Mesh& mesh);
constexpr int kNumUnits = 3;
constexpr core::Indices<UnitIndex> kUnits(kNumUnits);

/// With these parameters.
Setting setting_on(Mesh mesh);

inline const Mesh kMeshes[] = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {1, 3}, {3, 1}, {1, 5}, {5, 1}};

/// One rank's groups; blocks until all ranks have come.
wire::SharedMesh make_mesh(const Setting& setting, const wire::StorePtr& store, int rank);

/// "unit 0" and so on, for all units of the setting.
std::vector<UnitSpec> unit_specs(const Setting& setting);

/// One rank's engine; blocks until all ranks have come.
std::unique_ptr<Engine> make_engine(const Setting& setting, const wire::StorePtr& store, int rank);

/// What the plan of `parameters` is: each rank's batches are its parameters of equal shapes.
plan::Plan plan_of(const layout::Parameters& parameters, const Mesh& mesh);

/// A leaf's values, of its parameters'.
at::Tensor leaf_of(const Engine& engine, core::LeafIndex leaf,
                   const std::function<at::Tensor(ParameterIndex)>& values);

/// As if every leaf of the unit had got a gradient of these values.
void put_gradients(Engine& engine, UnitIndex unit,
                   const std::function<at::Tensor(ParameterIndex)>& values);

/// Ascending.
std::vector<ParameterIndex> parameters_of(const layout::Parameters& parameters, UnitIndex unit);

/// fp32 integers of at most 8 bits, so exact in every dtype; different for each seed.
at::Tensor integers(const layout::OwnedParameter& parameter, int seed);

/// This rank's owned masters become `integers(parameter, seed + index)`.
void set_masters(Engine& engine, int seed);

/// The owned accumulator of a parameter; undefined elsewhere, and where nothing is held.
at::Tensor owned_gradient(Engine& engine, ParameterIndex parameter);

/// The weights of a parameter as its unit sees them, an fp32 copy.
at::Tensor weight_of(Engine& engine, ParameterIndex parameter);

/// Whether shapes and all values are equal; NaN equals nothing.
testing::AssertionResult same_values(const at::Tensor& got, const at::Tensor& expected);

using wire::pieces_of;

}  // namespace dmuon::engine
