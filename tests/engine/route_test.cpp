// Routing: after it the owner, and nobody else, has the mean of all ranks' gradients.

#include <gtest/gtest.h>

#include "dmuon/engine/engine.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

// Small integers times the number of ranks: their means, a node's and the mesh's, are exact in
// bf16.
at::Tensor gradient_of(const Setting& setting, int rank, ParameterIndex parameter) {
  return integers(setting.parameters[parameter], parameter.value())
      .fmod_(7)
      .add_(rank)
      .mul_(setting.mesh.num_slots());
}

at::Tensor mean_of(const Setting& setting, ParameterIndex parameter) {
  const int size = setting.mesh.num_slots();
  // The mean of rank + x over ranks, times their number.
  return integers(setting.parameters[parameter], parameter.value())
      .fmod_(7)
      .mul_(size)
      .add_(size * (size - 1) / 2);
}

class Route : public testing::TestWithParam<std::tuple<Mesh, at::ScalarType>> {
 protected:
  Route() {
    setting_ = setting_on(std::get<0>(GetParam()));
    setting_.reduce_dtype = std::get<1>(GetParam());
  }

  void put_and_route(Engine& engine, int rank) {
    for (const UnitIndex unit : kUnits) {
      put_gradients(engine, unit, [&](ParameterIndex parameter) {
        return gradient_of(setting_, rank, parameter);
      });
      engine.route(unit);
    }
  }

  Setting setting_;
};

TEST_P(Route, GivesTheOwnerTheMean) {
  wire::run_ranks(setting_.mesh.num_slots(), [this](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    put_and_route(*engine, rank);
    for (const ParameterIndex parameter : setting_.parameters.indices()) {
      const bool owner = setting_.parameters[parameter].owner == core::Slot(rank);
      const at::Tensor gradient = owned_gradient(*engine, parameter);
      EXPECT_EQ(gradient.defined(), owner);
      if (!owner) continue;
      const at::Tensor expected = mean_of(setting_, parameter);
      // 1/3 and 1/5 have no exact fp32: such a mean is within its last bits.
      EXPECT_LE(gradient.sub(expected).abs().max().item<float>(),
                setting_.mesh.num_slots() % 2 == 0 || setting_.mesh.num_slots() == 1 ? 0.0F : 8e-6F)
          << "parameter " << parameter;
    }
  });
}

TEST_P(Route, AddsMicroStepsAndClearedGradientsStartAfresh) {
  wire::run_ranks(setting_.mesh.num_slots(), [this](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    put_and_route(*engine, rank);
    put_and_route(*engine, rank);
    engine->clear_gradient(LeafIndex(0));
    EXPECT_FALSE(owned_gradient(*engine, ParameterIndex(0)).defined());
    put_and_route(*engine, rank);
    for (const ParameterIndex parameter : setting_.parameters.indices()) {
      const at::Tensor gradient = owned_gradient(*engine, parameter);
      if (!gradient.defined()) continue;
      const at::Tensor expected =
          mean_of(setting_, parameter).mul(parameter == ParameterIndex(0) ? 1 : 3);
      EXPECT_LE(gradient.sub(expected).abs().max().item<float>(), 2e-5F)
          << "parameter " << parameter;
    }
  });
}

// A mean counts ranks without a gradient as zeros.
TEST_P(Route, CountsRanksWithoutAGradientAsZeros) {
  wire::run_ranks(setting_.mesh.num_slots(), [this](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    const int giver = setting_.mesh.num_slots() - 1;
    for (const UnitIndex unit : kUnits) {
      const ParameterIndex first = parameters_of(setting_.parameters, unit)[0];
      if (rank == giver)
        engine->put_gradient(LeafIndex(first.value()), gradient_of(setting_, giver, first));
      engine->route(unit);
    }
    for (const UnitIndex unit : kUnits) {
      for (const ParameterIndex parameter : parameters_of(setting_.parameters, unit)) {
        const at::Tensor gradient = owned_gradient(*engine, parameter);
        if (!gradient.defined()) continue;
        const bool given = parameter == parameters_of(setting_.parameters, unit)[0];
        const at::Tensor expected = gradient_of(setting_, giver, parameter)
                                        .mul(given ? 1.0 / setting_.mesh.num_slots() : 0.0);
        EXPECT_LE(gradient.sub(expected).abs().max().item<float>(), 2e-6F)
            << "parameter " << parameter;
      }
    }
  });
}

// Of each unit a rank sends every other column's part, then every other owner's part of its own
// column.
TEST_P(Route, SendsEachPartOnce) {
  wire::run_ranks(setting_.mesh.num_slots(), [this](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting_, store, rank);
    put_and_route(*engine, rank);
    const core::Shard shard(rank % setting_.mesh.num_shards);
    double intra = 0;
    double inter = 0;
    double bytes_intra = 0;
    double bytes_inter = 0;
    for (const UnitIndex unit : kUnits) {
      const layout::Packing& packing = engine->unit(unit).packing();
      for (const core::Shard column : packing.columns.indices()) {
        const layout::Part& part = packing.columns[column];
        if (column == shard) continue;
        intra += static_cast<double>(
            pieces_of(part, packing.num_elements, setting_.mesh.num_shards - 1));
        bytes_intra += static_cast<double>(part.size());
      }
      for (int slot = shard.value(); slot < packing.owners.size();
           slot += setting_.mesh.num_shards) {
        const auto size = packing.owners[core::Slot(slot)].size();  // one message, as of all parts
        if (slot == rank || size == 0) continue;
        inter += pieces_of(size, packing.columns[shard].size(), setting_.mesh.num_replicates - 1);
        bytes_inter += static_cast<double>(size);
      }
    }
    const auto element = static_cast<double>(c10::elementSize(setting_.reduce_dtype));
    const auto statistics = engine->statistics();
    EXPECT_EQ(statistics.at("routes"), 3);
    EXPECT_EQ(statistics.at("messages_intra"), intra);
    EXPECT_EQ(statistics.at("messages_inter"), inter);
    EXPECT_EQ(statistics.at("bytes_sent_intra"), bytes_intra * element);
    EXPECT_EQ(statistics.at("bytes_sent_inter"), bytes_inter * element);
  });
}

std::string case_name(const testing::TestParamInfo<Route::ParamType>& given) {
  const auto& [mesh, dtype] = given.param;
  return mesh_name(mesh) + (dtype == at::kFloat ? "Float" : "Bfloat16");
}

INSTANTIATE_TEST_SUITE_P(Meshes, Route,
                         testing::Combine(testing::ValuesIn(kMeshes),
                                          testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& given) { return case_name(given); });

}  // namespace
}  // namespace dmuon::engine
