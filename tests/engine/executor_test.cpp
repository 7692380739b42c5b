// The executor by itself: it does each operation that it is told, and knows no history.

#include "dmuon/engine/executor.h"

#include <ATen/ops/cat.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/engine/mesh_engine.h"

namespace dmuon::engine {
namespace {

using schedule::Kind;

const UnitIndex kUnit(0);

class ExecutorOnMesh : public testing::TestWithParam<Mesh> {
 protected:
  // Calls `body(executor)` on all ranks, with masters of seed 1.
  template <typename Body>
  void run(Body body) {
    const Setting setting = setting_on(GetParam());
    wire::run_ranks(setting.mesh.num_slots(), [&](int rank, const wire::StorePtr& store) {
      Executor executor(make_mesh(setting, store, rank), plan_of(setting.parameters, setting.mesh),
                        unit_specs(setting),
                        /*node_copy=*/true, c10::kCPU);
      write_masters(&executor, 1);
      body(executor);
    });
  }

  static void write_masters(Executor* executor, int seed) {
    for (const ParameterIndex parameter : executor->parameters().indices()) {
      at::Tensor master = executor->owned().of(parameter, wire::kMaster);
      if (master.defined())
        master.copy_(integers(executor->parameters()[parameter], seed + parameter.value()));
    }
  }

  bool has_inter() const { return GetParam().num_replicates > 1; }

  void publish(Executor* executor, bool with_stage_1) {
    const bool stages = has_inter() && with_stage_1;
    if (stages) executor->perform({.kind = Kind::kPublishInter, .subject = kUnit});
    schedule::Operation intra{.kind = Kind::kPublishIntra, .subject = kUnit};
    if (stages) intra.after.push_back({Kind::kPublishInter, kUnit});
    executor->perform(intra);
    executor->perform(
        {.kind = Kind::kAwaitWeights, .subject = kUnit, .after = {{Kind::kPublishIntra, kUnit}}});
  }

  void route(Executor* executor, bool hold) {
    Unit& unit = executor->unit(kUnit);
    for (const layout::PackedLeafIndex place : unit.packing().leaves.indices()) {
      const layout::Leaf& leaf = executor->leaves()[unit.packing().leaves[place].index];
      std::vector<at::Tensor> parts;
      for (const ParameterIndex part : leaf.parameters)
        parts.push_back(integers(executor->parameters()[part], 1).view({-1}));
      unit.put_gradient(place, at::cat(parts).view(leaf.sizes));
    }
    executor->perform({.kind = Kind::kRouteIntra, .subject = kUnit, .hold = hold});
    const bool sends = has_inter() && !hold;
    const auto after = [&](Kind kind, Kind earlier) {
      executor->perform({.kind = kind, .subject = kUnit, .after = {{earlier, kUnit}}});
    };
    if (sends) after(Kind::kRouteInter, Kind::kRouteIntra);
    after(Kind::kFinishRouteIntra, Kind::kRouteIntra);
    EXPECT_FALSE(executor->unit(kUnit).gradients().allocated());
    if (sends) after(Kind::kFinishRouteInter, Kind::kRouteInter);
  }

  static testing::AssertionResult has_weights(Executor& executor, int seed) {
    Unit& unit = executor.unit(kUnit);
    for (const layout::PackedParameter& packed : unit.packing().parameters) {
      const ParameterIndex parameter = packed.index;
      const layout::Segment part = packed.in_unit;
      const at::Tensor expected =
          integers(executor.parameters()[parameter], seed + parameter.value());
      const auto same =
          same_values(unit.weights().slice(part.begin, part.end).view(expected.sizes()), expected);
      if (!same) return same;
    }
    return testing::AssertionSuccess();
  }
};

TEST_P(ExecutorOnMesh, PublishesEachTimeThatItIsTold) {
  run([this](Executor& executor) {
    publish(&executor, /*with_stage_1=*/true);
    EXPECT_TRUE(has_weights(executor, 1));
    publish(&executor, true);
    EXPECT_EQ(executor.statistics().at("unshards"), 2);
    // Stage 2 alone brings what the node copies hold, old or not.
    write_masters(&executor, 50);
    publish(&executor, /*with_stage_1=*/false);
    EXPECT_TRUE(has_weights(executor, has_inter() ? 1 : 50));
    executor.perform({.kind = Kind::kReshard, .subject = kUnit});
    EXPECT_FALSE(executor.unit(kUnit).weights().allocated());
  });
}

TEST_P(ExecutorOnMesh, KeepsAPartialSumUntilARouteThatHoldsNothing) {
  run([this](Executor& executor) {
    if (has_inter()) {
      route(&executor, /*hold=*/true);
      EXPECT_FALSE(executor.owned().filled(ParameterIndex(0)));
    }
    route(&executor, /*hold=*/false);
    EXPECT_FALSE(executor.unit(kUnit).gradients().allocated());
    for (const ParameterIndex parameter : parameters_of(executor.parameters(), kUnit)) {
      EXPECT_TRUE(executor.has_gradient(parameter));
      if (!executor.owned().owns(parameter)) continue;
      EXPECT_TRUE(executor.owned().filled(parameter));
      const at::Tensor expected =
          integers(executor.parameters()[parameter], 1).mul(has_inter() ? 2 : 1);
      const at::Tensor got = executor.owned().of(parameter, wire::kGradient);
      EXPECT_LE(got.sub(expected).abs().max().item<float>(), 1e-4F) << "parameter " << parameter;
    }
    executor.clear_gradient(ParameterIndex(0));
    EXPECT_FALSE(executor.has_gradient(ParameterIndex(0)));
    EXPECT_FALSE(executor.owned().filled(ParameterIndex(0)));
    EXPECT_TRUE(executor.has_gradient(ParameterIndex(1)));
  });
}

class Calls final : public Update {
 public:
  explicit Calls(std::vector<std::string>* seen) : seen_(seen) {}
  void prepare(core::BatchIndex batch) override { add("prepare", batch); }
  void orthogonalise(core::BatchIndex batch) override { add("orthogonalise", batch); }
  void apply(core::BatchIndex batch) override { add("apply", batch); }

 private:
  void add(const char* what, core::BatchIndex batch) {
    seen_->push_back(core::message(what, ' ', batch));
  }
  std::vector<std::string>* seen_;
};

TEST_P(ExecutorOnMesh, UpdatesBatchesInOrderOfIssue) {
  run([](Executor& executor) {
    if (executor.owned().batches().size() < 2) return;
    std::vector<std::string> seen;
    executor.set_update(std::make_shared<Calls>(&seen));
    const core::BatchIndex first(1);
    const core::BatchIndex second(0);
    for (const core::BatchIndex batch : {first, second}) {
      for (const Kind kind : {Kind::kPrepare, Kind::kOrthogonalise, Kind::kApply})
        executor.perform({.kind = kind, .subject = batch});
    }
    executor.set_update(nullptr);  // operations that were issued keep theirs
    executor.perform(
        {.kind = Kind::kFinishUpdate, .subject = second, .after = {{Kind::kApply, second}}});
    EXPECT_EQ(seen, (std::vector<std::string>{"prepare 1", "orthogonalise 1", "apply 1",
                                              "prepare 0", "orthogonalise 0", "apply 0"}));
  });
}

class Failing final : public Update {
 public:
  void prepare(core::BatchIndex) override {}
  void orthogonalise(core::BatchIndex) override {}
  void apply(core::BatchIndex) override { throw std::domain_error("no memory"); }
};

// A publication that was issued all the same sends nothing: peers never get old weights.
TEST(Executor, PublishesNothingOfABatchWhoseUpdateFailed) {
  const Setting setting = setting_on({1, 1});
  wire::run_ranks(1, [&](int rank, const wire::StorePtr& store) {
    Executor executor(make_mesh(setting, store, rank), plan_of(setting.parameters, setting.mesh),
                      unit_specs(setting), /*node_copy=*/true, c10::kCPU);
    const core::BatchIndex batch(0);
    executor.set_update(std::make_shared<Failing>());
    executor.perform({.kind = Kind::kApply, .subject = batch});
    executor.perform(
        {.kind = Kind::kPublishIntra, .subject = kUnit, .after = {{Kind::kApply, batch}}});
    const schedule::Operation waits[] = {
        {.kind = Kind::kFinishUpdate, .subject = batch, .after = {{Kind::kApply, batch}}},
        {.kind = Kind::kAwaitWeights, .subject = kUnit, .after = {{Kind::kPublishIntra, kUnit}}}};
    for (const schedule::Operation& wait : waits)
      EXPECT_THROW(executor.perform(wait), std::runtime_error);
  });
}

// Rank 0's operations travel until rank 1 comes, and are one lane's.
TEST(Executor, CountsALaneAsBusyWithOneModelAtATime) {
  const Setting setting = setting_on({2, 1});
  wire::run_ranks(2, [&](int rank, const wire::StorePtr& store) {
    const wire::SharedMesh mesh = make_mesh(setting, store, rank);
    const plan::Plan plan = plan_of(setting.parameters, setting.mesh);
    Executor first(mesh, plan, unit_specs(setting), /*node_copy=*/true, c10::kCPU);
    Executor second(mesh, plan, unit_specs(setting), /*node_copy=*/true, c10::kCPU);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const double begin = wire::Clock::host_now();
    for (Executor* executor : {&first, &second})
      executor->perform({.kind = Kind::kPublishInter, .subject = kUnit});
    for (Executor* executor : {&first, &second}) executor->drain();
    const double elapsed = wire::Clock::host_now() - begin;
    double busy = 0;
    for (Executor* executor : {&first, &second})
      busy += executor->profile().seconds().at("busy_inter_s");
    EXPECT_LE(busy, elapsed);
    EXPECT_GT(busy, 0);
  });
}

// gloo's threads may still be in a collective on them; five ranks use its broadcast.
TEST(Executor, NeverFreesBuffersOfOperationsThatFailed) {
  Setting setting = setting_on({1, 5});
  setting.timeout = std::chrono::milliseconds(400);
  wire::run_ranks(5, [&](int rank, const wire::StorePtr& store) {
    auto executor = std::make_unique<Executor>(make_mesh(setting, store, rank),
                                               plan_of(setting.parameters, setting.mesh),
                                               unit_specs(setting), /*node_copy=*/true, c10::kCPU);
    const UnitIndex other(2);
    const auto weights = [&](UnitIndex unit) { return executor->unit(unit).weights().flat(); };
    const auto publish = [&](UnitIndex unit) {
      executor->perform({.kind = Kind::kPublishIntra, .subject = unit});
    };
    const auto await = [&](UnitIndex unit) {
      executor->perform(
          {.kind = Kind::kAwaitWeights, .subject = unit, .after = {{Kind::kPublishIntra, unit}}});
    };
    publish(other);
    await(other);
    if (rank == 4) return static_cast<void>(store->get("over"));  // alive, and elsewhere
    publish(kUnit);
    EXPECT_THROW(await(kUnit), core::CommError);
    const at::Tensor failed = weights(kUnit);
    const at::Tensor done = weights(other);
    executor.reset();
    EXPECT_NO_THROW(failed.sum());
    EXPECT_THROW(done.sum(), c10::Error);
    if (store->add("failed", 1) == 4) store->set("over", std::vector<std::uint8_t>{1});
  });
}

// A parameter's elements; after the last one of a leaf, with the gap to a multiple of 128.
std::int64_t elements_with_gap(const layout::Parameters& parameters, ParameterIndex last) {
  const ParameterIndex next(last.value() + 1);
  const std::int64_t own = parameters[last].num_elements();
  if (parameters.contains(next) && parameters[next].continues) return own;
  std::int64_t leaf = own;
  for (ParameterIndex at = last; parameters[at].continues;) leaf += parameters[--at].num_elements();
  return own + (128 - leaf % 128) % 128;
}

// What every parameter fills of a buffer counts for its owner, and every batch of this rank for the
// units that it touches.
TEST_P(ExecutorOnMesh, DescribesUnitsAndBatchesToASchedule) {
  run([](Executor& executor) {
    const schedule::Layout layout = executor.layout();
    EXPECT_EQ(layout.num_replicates, GetParam().num_replicates);
    EXPECT_EQ(layout.num_shards, GetParam().num_shards);
    ASSERT_EQ(layout.units.size(), kNumUnits);
    for (const UnitIndex unit : kUnits) {
      core::Vector<core::Slot, std::int64_t> expected(GetParam().num_slots());
      for (const ParameterIndex parameter : parameters_of(executor.parameters(), unit))
        expected[executor.parameters()[parameter].owner] +=
            elements_with_gap(executor.parameters(), parameter);
      EXPECT_EQ(layout.units[unit].owner_elements, expected);
      EXPECT_EQ(layout.units[unit].name, "unit " + std::to_string(unit.value()));
      EXPECT_EQ(layout.units[unit].weight_size, 4);
    }
    const schedule::Batches touched = executor.units_of_batches();
    ASSERT_EQ(touched.size(), executor.owned().batches().size());
    for (const core::BatchIndex batch : touched.indices()) {
      std::vector<UnitIndex> expected;
      for (const ParameterIndex parameter : executor.owned().batches()[batch].parameters)
        expected.push_back(executor.parameters()[parameter].unit_index());
      EXPECT_EQ(touched[batch], expected);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ExecutorOnMesh,
                         testing::Values(Mesh{1, 1}, Mesh{1, 2}, Mesh{2, 1}, Mesh{2, 2}),
                         [](const auto& given) { return mesh_name(given.param); });

}  // namespace
}  // namespace dmuon::engine
