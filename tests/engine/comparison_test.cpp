// What ranks compare before they issue: where they differ, all say where each of them is.

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

// What each of two ranks says where the second does something else than the first.
template <typename First, typename Second>
void expect_refusal(First first, Second second, const std::string& expected) {
  const Setting setting = setting_on({1, 2});
  wire::run_ranks(2, [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    engine->publish();
    engine->end_step();
    try {
      rank == 0 ? first(*engine) : second(*engine);
      ADD_FAILURE() << "rank " << rank << " went on";
    } catch (const core::InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos)
          << "rank " << rank << ": " << error.what();
    }
  });
}

void use_first(Engine& engine) {
  engine.begin_forward();
  engine.before_forward(UnitIndex(0));
}

TEST(Comparison, LetsRanksGoOnThatMeet) {
  const Setting setting = setting_on({1, 2});
  wire::run_ranks(2, [&](int rank, const wire::StorePtr& store) {
    const auto engine = make_engine(setting, store, rank);
    engine->publish();
    for (int i = 0; i < 2; ++i) {
      use_first(*engine);
      EXPECT_NO_THROW(engine->meet("full_params"));
    }
  });
}

TEST(Comparison, SaysWhereEachRankIs) {
  expect_refusal(
      use_first,
      [](Engine& engine) {
        engine.begin_forward();
        engine.before_forward(UnitIndex(1));
      },
      "ranks disagree in step 2: rank 0 of the mesh is at the use of 'unit 0', rank 1 is at the "
      "use of 'unit 1'");
  expect_refusal(
      use_first, [](Engine& engine) { engine.meet("full_params"); },
      "in step 2: rank 0 of the mesh is at the use of 'unit 0', rank 1 is at ");
  expect_refusal(
      [](Engine& engine) {
        use_first(engine);
        engine.settle();
      },
      [](Engine& engine) {
        use_first(engine);
        engine.before_forward(UnitIndex(1));
      },
      "rank 0 of the mesh is at the end of a pass, rank 1 is at the use of 'unit 1'");
}

// Two models of equal units, which ranks begin in opposite order.
TEST(Comparison, TellsModelsOfAMeshApart) {
  const Setting setting = setting_on({1, 2});
  wire::run_ranks(2, [&](int rank, const wire::StorePtr& store) {
    const wire::SharedMesh mesh = make_mesh(setting, store, rank);
    const plan::Plan plan = plan_of(setting.parameters, setting.mesh);
    Engine first({}, mesh, plan, unit_specs(setting));
    Engine second({}, mesh, plan, unit_specs(setting));
    first.publish();
    second.publish();
    try {
      use_first(rank == 0 ? first : second);
      ADD_FAILURE() << "rank " << rank << " went on";
    } catch (const core::InvalidArgument& error) {
      const std::string expected =
          rank == 0
              ? "in step 1 of model 1: rank 0 of the mesh is at the use of 'unit 0', rank 1 is "
                "at a use of model 2. Expected: all ranks use the models of a mesh"
              : "in step 1 of model 2: rank 0 of the mesh is at a use of model 1, rank 1 is at "
                "the use of 'unit 0'. Expected: all ranks use the models of a mesh";
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  });
}

// A name is known on the rank alone that is at it.
TEST(Comparison, TellsCallsApart) {
  expect_refusal([](Engine& engine) { engine.meet("full_params"); },
                 [](Engine& engine) { engine.meet("verify"); }, "another call");
}

}  // namespace
}  // namespace dmuon::engine
