#include "dmuon/predict/prediction.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/predict/owned.h"
#include "tests/predict/small_setting.h"

namespace dmuon::predict {
namespace {

using schedule::Lane;

constexpr double kForwardMs = 4 * 0.04;  // 4 layers of 4e6 FLOPs a token, 1000 tokens
constexpr double kMatrices = 8e6;        // elements

TEST(Predict, OneRankTakesTheTimeOfItsWork) {
  const Setting setting = small_setting({1, 1});
  const double update_ms = plan::milliseconds(setting.plan.makespan_ns());
  const Prediction adamw = predict(setting, Contender::kAdamW);
  EXPECT_NEAR(adamw.adamw_ms, kMatrices * 28 / 1e9, 1e-9);
  EXPECT_NEAR(adamw.step_ms, 3 * kForwardMs + adamw.adamw_ms, 1e-9);
  const Prediction dmuon = predict(setting, Contender::kDmuon);
  EXPECT_EQ(dmuon.adamw_ms, 0);
  EXPECT_NEAR(dmuon.update_ms, update_ms, 1e-9);
  EXPECT_NEAR(dmuon.step_ms, 3 * kForwardMs + update_ms, 1e-9);
  EXPECT_NEAR(dmuon.phases_ms[Phase::kBackward], 2 * kForwardMs, 1e-9);
  for (const Prediction& one : {adamw, dmuon}) {
    EXPECT_EQ(one.intra_bytes + one.inter_bytes, 0);
    EXPECT_EQ(one.hidden, 1);
  }
}

// The update cannot hide on the device that computes.
TEST(Predict, ALateUpdateOfOneRankTakesAsLong) {
  const Setting setting = small_setting({1, 1}, 4, late());
  const Prediction dmuon = predict(setting, Contender::kDmuon);
  EXPECT_GT(dmuon.beside_ms + dmuon.waits_ms[Phase::kForward][Cause::kUpdate], 0);
  EXPECT_NEAR(dmuon.step_ms, 3 * kForwardMs + plan::milliseconds(setting.plan.makespan_ns()), 1e-9);
}

// A short forward waits for weights whose owner is late. That is the update's time, not the
// messages'.
TEST(Predict, WaitsForALateOwnerAreItsUpdates) {
  const auto predicted = [](const plan::PlanOptions& options) {
    Setting setting = small_setting({2, 2}, 8, options);
    setting.tokens = 1;
    return predict(setting, Contender::kDmuon);
  };
  const Prediction in_step = predicted({});
  const Prediction late_step = predicted(late());
  const double without_ms = in_step.step_ms - in_step.optimizer_ms;
  EXPECT_GT(in_step.optimizer_ms, 0.5 * in_step.step_ms);
  EXPECT_NEAR(late_step.optimizer_ms, late_step.step_ms - without_ms, 0.1 * in_step.optimizer_ms);
}

// A rank that owns one of its slot's two matrices receives half of its directions, in 4 bytes, and
// half of the other one's results, in 2.
TEST(Predict, CountsTheBytesOfASlot) {
  Setting setting = small_setting({.num_replicates = 1, .num_shards = 1, .tensor_parallel = 2}, 1);
  EXPECT_EQ(exchanged_bytes(setting.plan)[core::Owner(0)], 1e6 * 2);  // a whole result
  for (plan::Parameter& parameter : setting.plan.inventory) parameter.tensor_parallel = true;
  ASSERT_NE(setting.plan.owner.front(), setting.plan.owner.back());
  for (const double bytes : exchanged_bytes(setting.plan)) EXPECT_EQ(bytes, 0.5e6 * (4 + 2));
  setting.plan.costs = plan::with_exchange(setting.plan.costs, setting.device, 2);
  EXPECT_EQ(predict(setting, Contender::kDmuon).intra_bytes, 0.5e6 * (4 + 2));
  EXPECT_EQ(predict(setting, Contender::kAdamW).intra_bytes, 0);
  for (const core::ParameterIndex matrix : setting.plan.inventory.indices())
    setting.plan.owner[matrix] = core::Owner(1);
  EXPECT_EQ(exchanged_bytes(setting.plan)[core::Owner(0)], 1e6 * 4);
  EXPECT_EQ(exchanged_bytes(setting.plan)[core::Owner(1)], 1e6 * 4);
}

// A device receives three quarters of the weights twice, in 2 bytes, and sends as much of the
// gradients, in 4. dmuon keeps the last layer's weights for the backward, which begins with it.
TEST(Predict, CountsTheBytesOfANode) {
  const double adamw = predict(small_setting({1, 4}), Contender::kAdamW).intra_bytes;
  const double expected = kMatrices * 0.75 * (2 + 2 + 4);
  EXPECT_NEAR(adamw, expected, 1);
  const Setting setting = small_setting({1, 4});
  const Prediction dmuon = predict(setting, Contender::kDmuon);
  // The busiest device owns one of the last layer's two matrices.
  EXPECT_NEAR(dmuon.intra_bytes, kMatrices * 0.75 * 8 - 1e6 * 2, 1e4);
  EXPECT_EQ(dmuon.inter_bytes, 0);
}

// An all-reduce sends a sum's gradients and then their sums. dmuon's stages send 4 bytes of a
// gradient and 2 of a weight, once.
TEST(Predict, CountsTheBytesBetweenNodes) {
  const Setting setting = small_setting({2, 2});
  const double column = kMatrices / 2;
  EXPECT_NEAR(predict(setting, Contender::kAdamW).inter_bytes, column * 0.5 * 2 * 4, 1);
  EXPECT_NEAR(predict(setting, Contender::kDmuon).inter_bytes, column * 0.5 * (4 + 2),
              1e3);  // parts begin at aligned elements
}

TEST(Predict, WaitsForASlowLinkAsLongAsItTakes) {
  Setting setting = small_setting({2, 1});
  setting.network.gb_per_s = 0.01;
  const Prediction dmuon = predict(setting, Contender::kDmuon);
  const double wire_ms = kMatrices * 0.5 * (4 + 2) / 1e4;
  EXPECT_GT(dmuon.step_ms, wire_ms);
  EXPECT_LT(dmuon.step_ms, wire_ms * 1.02);
  EXPECT_GT(dmuon.waits_ms[Phase::kForward][Cause::kInter], 0);
  EXPECT_LT(dmuon.hidden, 0.02);
}

// A node's devices share its adapter.
TEST(Predict, AnAdapterOfANodeIsShared) {
  Setting setting = small_setting({2, 2});
  const double apart = predict(setting, Contender::kAdamW).busy_ms[Lane::kInter];
  setting.network.per_device = false;
  EXPECT_NEAR(predict(setting, Contender::kAdamW).busy_ms[Lane::kInter], 2 * apart, 1e-9);
}

TEST(Predict, MuonAgOrthogonalisesEverythingOnEveryRank) {
  const Setting setting = small_setting({2, 2});
  const Prediction muon_ag = predict(setting, Contender::kMuonAg);
  const double all_ms = plan::milliseconds(small_setting({1, 1}).plan.makespan_ns());
  EXPECT_NEAR(muon_ag.update_ms, all_ms, 0.1 * all_ms);
}

// One unit's travel while another's are orthogonalised, in the room of two units' weights.
TEST(Predict, MuonAgGathersTheDirectionsOfTwoUnitsAtMost) {
  for (const bool on_cpu : {false, true}) {
    plan::PlanOptions options;
    options.on_cpu = on_cpu;
    const Prediction muon_ag = predict(small_setting({1, 4}, 6, options), Contender::kMuonAg);
    std::vector<double> gathered_ms(7);
    std::vector<double> updated_ms(7);
    for (const Span& span : muon_ag.spans) {
      if (span.start_ms < muon_ag.begins_ms[Phase::kStep]) continue;
      if (span.kind == "publish intra")
        gathered_ms[static_cast<std::size_t>(span.unit)] = span.start_ms;
      if (span.kind == "orthogonalise")
        updated_ms[static_cast<std::size_t>(span.batch) + 1] = span.end_ms;
    }
    for (std::size_t unit = 3; unit < gathered_ms.size(); ++unit)
      EXPECT_GE(gathered_ms[unit], updated_ms[unit - 2]) << unit;
    EXPECT_LT(gathered_ms[2], updated_ms[1]);
    EXPECT_GT(updated_ms[6], updated_ms[5]);
  }
}

// Two of eight matrices at once take longer than one after the other, three take less.
TEST(Predict, MuonAgTakesTheCheapestBatchesAsAnOwnerDoes) {
  Setting setting = small_setting({1, 1});
  for (const std::vector<plan::BatchTime>& batches :
       {std::vector<plan::BatchTime>{{1, 1'000'000}, {2, 3'000'000}},
        {{1, 1'000'000}, {3, 2'000'000}}}) {
    const plan::CostTable costs{"by hand", {{setting.plan.costs.shapes.front().shape, batches}}};
    setting.plan = plan::make_plan(setting.plan.inventory, {1, 1}, "load_balance", costs);
    EXPECT_NEAR(predict(setting, Contender::kMuonAg).update_ms,
                predict(setting, Contender::kDmuon).update_ms, 1e-9);
  }
}

// AdamW updates the parameters that Muon does not take, in all programs.
TEST(Predict, ParametersOutsideOfMuonAreUpdatedByAdamW) {
  Setting setting = small_setting({1, 4});
  setting.training.outside_elements = 4'000'000;
  setting.training.outside_flops = 1e6;
  const Prediction dmuon = predict(setting, Contender::kDmuon);
  EXPECT_NEAR(dmuon.adamw_ms, 1e6 * 28 / 1e9, 1e-9);
  EXPECT_NEAR(dmuon.busy_ms[Lane::kCompute], 3 * (kForwardMs + 0.01), 1e-9);
}

// FSDP2's root group gathers them once a step, in 2 bytes, and scatters gradients, in 4.
TEST(Predict, CountsTheBytesOfParametersOutsideOfMuon) {
  Setting with = small_setting({1, 4});
  with.training.outside_elements = 4'000'000;
  const Setting without = small_setting({1, 4});
  for (const Contender contender : kContenders) {
    EXPECT_NEAR(predict(with, contender).intra_bytes - predict(without, contender).intra_bytes,
                4e6 * 0.75 * (2 + 4), 1e5);
  }
}

// FSDP2's sums between nodes block the hosts of CPUs after the backward of each block. They are
// waits, beside which the update and messages inside the node hold up nothing.
TEST(Predict, SumsOfTheHostBlockBackwardsOnCpus) {
  const auto predicted = [](layout::Mesh mesh, bool on_cpu, double host_sum_ms,
                            Contender contender = Contender::kDmuon) {
    plan::PlanOptions options;
    options.on_cpu = on_cpu;
    Setting setting = small_setting(mesh, 4, options);
    setting.training.outside_elements = 1000;
    setting.host_sum_ms = host_sum_ms;
    return predict(setting, contender);
  };
  for (const layout::Mesh& mesh : {layout::Mesh{2, 1}, layout::Mesh{2, 2}}) {
    const Prediction one = predicted(mesh, true, 1);
    const Prediction three = predicted(mesh, true, 3);
    EXPECT_NEAR(three.phases_ms[Phase::kBackward] - one.phases_ms[Phase::kBackward], 4 * 2, 1e-6);
    EXPECT_NEAR(three.step_ms - one.step_ms, 4 * 2, 1e-6);
    EXPECT_NEAR(three.beside_ms, one.beside_ms, 1e-6);
    EXPECT_NEAR(three.busy_ms[Lane::kCompute], one.busy_ms[Lane::kCompute], 1e-9);
  }
  for (const auto& [mesh, on_cpu, contender] :
       {std::tuple{layout::Mesh{2, 1}, false, Contender::kDmuon},
        {layout::Mesh{1, 2}, true, Contender::kDmuon},
        {layout::Mesh{2, 1}, true, Contender::kAdamW}})
    EXPECT_EQ(predicted(mesh, on_cpu, 3, contender).step_ms,
              predicted(mesh, on_cpu, 0, contender).step_ms);
}

// FSDP2's last sum ends before the backward does, as under AdamW.
TEST(Predict, BackwardsWaitForGradientsOutsideOfMuon) {
  for (const layout::Mesh& mesh : {layout::Mesh{2, 1}, layout::Mesh{1, 2}}) {
    for (const bool on_cpu : {true, false}) {
      plan::PlanOptions options;
      options.on_cpu = on_cpu;
      Setting setting = small_setting(mesh, 4, options);
      setting.training.outside_elements = 4'000'000;
      setting.network.gb_per_s = setting.device.link_gb_per_s = 1;
      const Prediction dmuon = predict(setting, Contender::kDmuon);
      EXPECT_EQ(dmuon.waits_ms[Phase::kStep][Cause::kOutside], 0);
      EXPECT_GT(dmuon.waits_ms[Phase::kBackward][Cause::kOutside], 0);
    }
  }
}

// A network beside which all other work is short, and units of one matrix each.
Setting one_matrix_a_unit(layout::Mesh mesh, int num_layers, const plan::PlanOptions& options) {
  Setting setting = small_setting(mesh, num_layers, options);
  plan::Inventory inventory;
  for (const plan::Parameter& parameter : setting.plan.inventory)
    if (parameter.name.ends_with("up")) inventory.push_back(parameter);
  setting.plan = plan::make_plan(inventory, mesh, "round_robin", setting.plan.costs, options);
  setting.network.gb_per_s = 0.01;
  return setting;
}

// A column sends nothing of a unit that another column owns. Its next unit must not have the
// adapter to itself.
TEST(Predict, UnitsOfDifferentColumnsShareANodesAdapter) {
  for (const bool on_cpu : {false, true}) {
    plan::PlanOptions options;
    options.on_cpu = on_cpu;
    Setting setting = one_matrix_a_unit({2, 8}, 16, options);
    setting.network.per_device = false;
    // Each node owns half of the matrices. It sends gradients of the others, and its own weights.
    const double wire_ms = 16e6 * 0.5 * (4 + 2) / 1e4;
    const Prediction shared = predict(setting, Contender::kDmuon);
    EXPECT_GE(shared.step_ms, wire_ms) << on_cpu;
    EXPECT_LE(shared.step_ms, (on_cpu ? 1.05 : 2.05) * wire_ms);  // one direction after the other
    setting.network.per_device = true;
    EXPECT_LT(predict(setting, Contender::kDmuon).step_ms, 0.5 * wire_ms);
  }
}

// Each unit's one matrix travels to one of two nodes. gloo's lanes begin the next unit's messages,
// which take the other direction, while these travel.
TEST(Predict, LanesOfCpusFillBothDirectionsOfALink) {
  const auto busy_ms = [](bool on_cpu, int lookahead = 2, double outside = 0) {
    plan::PlanOptions options;
    options.on_cpu = on_cpu;
    options.lookahead = lookahead;
    Setting setting = one_matrix_a_unit({2, 1}, 4, options);
    setting.training.outside_elements = static_cast<std::int64_t>(outside);
    return predict(setting, Contender::kDmuon).busy_ms[Lane::kInter];
  };
  const double wire_ms = 4 * 1e6 * (4 + 2) / 1e4;
  EXPECT_NEAR(busy_ms(false), wire_ms, 0.01 * wire_ms);
  EXPECT_NEAR(busy_ms(true), wire_ms / 2, 0.01 * wire_ms);
  // Without lookahead weights travel unit by unit.
  EXPECT_GT(busy_ms(true, 0), 1.2 * busy_ms(true));
  // FSDP2's gradients go there and back, half of them in each direction, beside the engine's bytes.
  EXPECT_NEAR(busy_ms(true, 2, 1e6) - busy_ms(true), 2 * 0.5e6 * 4 / 1e4, 0.01 * wire_ms);
}

// The update lane exchanges slices and orthogonalises one batch while it prepares the next one.
TEST(Predict, WeightsOutsideOfMuonWaitForNoUpdate) {
  const auto predicted = [](std::int64_t outside) {
    Setting setting = small_setting({2, 1, 2}, 8, late());
    for (plan::Parameter& parameter : setting.plan.inventory) parameter.tensor_parallel = true;
    setting.plan.costs = plan::with_exchange(setting.plan.costs, setting.device, 2);
    setting.training.outside_elements = outside;
    return predict(setting, Contender::kDmuon);
  };
  const Prediction with = predicted(1);
  EXPECT_NEAR(with.waits_ms[Phase::kForward][Cause::kOutside], 0, 1e-3);
  EXPECT_NEAR(with.optimizer_ms, predicted(0).optimizer_ms, 1e-3);
}

// The output head follows the last unit.
TEST(Predict, TheHeadRunsInTheLastUnit) {
  Setting setting = small_setting({1, 4});
  setting.training.outside_elements = 4'000'000;
  setting.training.outside_flops = 1e6;
  for (const Contender contender : kContenders) {
    for (const Span& span : predict(setting, contender).spans) {
      if (span.kind != "forward") continue;
      const double unit_ms = span.unit == 0 ? 0 : kForwardMs / 4;
      EXPECT_NEAR(span.end_ms - span.start_ms, unit_ms + (span.unit == 4 ? 0.01 : 0), 1e-9);
    }
  }
}

// Beside replicated weights the baselines are those of DistributedDataParallel.
Setting replicated(layout::Mesh mesh, bool on_cpu = false) {
  plan::PlanOptions options;
  options.replicated = true;
  options.node_copy = options.reshard_after_forward = false;
  options.on_cpu = on_cpu;
  return small_setting(mesh, 4, options);
}

// All gradients are summed, in 4 bytes, there and back. dmuon sends a matrix's gradients to its
// owner and its new weights, in 2 bytes, to all.
TEST(Predict, CountsTheBytesOfReplicatedWeights) {
  for (const double outside : {0.0, 4e6}) {
    const auto with = [&](layout::Mesh mesh) {
      Setting setting = replicated(mesh);
      setting.training.outside_elements = static_cast<std::int64_t>(outside);
      return setting;
    };
    for (const Contender baseline : {Contender::kAdamW, Contender::kMuonAg}) {
      EXPECT_NEAR(predict(with({1, 4}), baseline).intra_bytes, (kMatrices + outside) * 0.75 * 2 * 4,
                  1);
      EXPECT_NEAR(predict(with({2, 2}), baseline).inter_bytes,
                  (kMatrices + outside) / 2 * 0.5 * 2 * 4, 1);
    }
    EXPECT_NEAR(predict(with({1, 4}), Contender::kDmuon).intra_bytes,
                kMatrices * 0.75 * (4 + 2) + outside * 0.75 * 2 * 4, 1e4);
    EXPECT_NEAR(predict(with({2, 2}), Contender::kDmuon).inter_bytes,
                kMatrices / 2 * 0.5 * (4 + 2) + outside / 2 * 0.5 * 2 * 4, 1e4);
  }
}

// gloo's ring goes through all ranks, so each link takes 3/4 of the values, there and back.
TEST(Predict, AnAllReduceOfCpusIsOneRing) {
  for (const bool on_cpu : {false, true}) {
    const Setting setting = replicated({2, 2}, on_cpu);
    const Prediction ddp = predict(setting, Contender::kAdamW);
    const double passed_on = on_cpu ? 0.75 : 0.5;
    EXPECT_NEAR(ddp.inter_bytes, kMatrices / 2 * passed_on * 2 * 4, 1);
    EXPECT_NEAR(ddp.busy_ms[Lane::kInter], kMatrices / 2 * passed_on * 2 * 4 / 1e8, 1e-9);
  }
}

// Every rank updates all, and orthogonalises all without a message.
TEST(Predict, RanksOfDdpUpdateEverything) {
  Setting setting = replicated({1, 4});
  setting.training.outside_elements = 4'000'000;
  const double outside_ms = 4e6 * 28 / 1e9;
  const Prediction ddp = predict(setting, Contender::kAdamW);
  EXPECT_NEAR(ddp.adamw_ms, outside_ms + kMatrices * 28 / 1e9, 1e-9);
  EXPECT_NEAR(ddp.memory_bytes, (kMatrices + 4e6) * (16 + 4), 1);
  const Prediction dmuon = predict(setting, Contender::kDmuon);
  EXPECT_NEAR(dmuon.adamw_ms, outside_ms, 1e-9);
  EXPECT_LT(dmuon.memory_bytes, ddp.memory_bytes);
  const Prediction muon = predict(setting, Contender::kMuonAg);
  EXPECT_EQ(muon.waits_ms[Phase::kStep][Cause::kIntra], 0);
  EXPECT_NEAR(muon.phases_ms[Phase::kStep], muon.update_ms, 1e-9);
}

// The gradient of a head of its own leaves first. A head that is the embedding too comes last.
TEST(Predict, DdpHidesTheGradientsOfAHead) {
  Setting setting = replicated({2, 1});
  setting.network.gb_per_s = 1000;
  setting.training.outside_elements = 2'000'000;
  const auto waits_ms = [&](double head) {
    setting.training.outside_flops = 2 * head;
    return predict(setting, Contender::kAdamW).waits_ms[Phase::kBackward][Cause::kInter];
  };
  // There and back, half of them in each direction.
  EXPECT_NEAR(waits_ms(2e6) - waits_ms(1e6), 1e6 * 4 / 1e9, 1e-9);
}

TEST(Predict, RefusesWhatIsNoSetting) {
  Setting setting = small_setting({1, 2});
  setting.tokens = 0;
  EXPECT_THROW(predict(setting, Contender::kDmuon), core::InvalidArgument);
  setting = small_setting({1, 2});
  setting.training.unit_flops = {};
  EXPECT_THROW(predict(setting, Contender::kAdamW), core::InvalidArgument);
  setting = small_setting({1, 2});
  setting.network.gb_per_s = 0;
  EXPECT_THROW(predict(setting, Contender::kMuonAg), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::predict
