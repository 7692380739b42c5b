// What a step's parts take and hold, computed by hand.

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "dmuon/plan/wire_time.h"
#include "dmuon/predict/prediction.h"
#include "tests/predict/small_setting.h"

namespace dmuon::predict {
namespace {

using schedule::Lane;

constexpr double kMatrices = 8e6;    // elements, in 4 units
constexpr double kBytesPerMs = 1e8;  // of an adapter; a link's are ten times as many

// A message to 8 members takes 3 steps of a tree. Each step of the run has 4 + 4 gathers and 4
// scatters.
TEST(Rates, AMessageTakesItsLatencyForEachDoublingOfMembers) {
  Setting setting = small_setting({1, 8});
  const double without = predict(setting, Contender::kAdamW).busy_ms[Lane::kIntra];
  setting.device.launch_us = 10;  // two a doubling
  EXPECT_NEAR(predict(setting, Contender::kAdamW).busy_ms[Lane::kIntra] - without,
              12 * 3 * 2 * 0.010, 1e-9);
}

// Each gradient is summed there and back.
TEST(Rates, AnAllReduceTravelsTwice) {
  Setting setting = small_setting({4, 1});
  const double bytes = 2 * kMatrices * 4 * 3 / 4;
  EXPECT_NEAR(predict(setting, Contender::kAdamW).busy_ms[Lane::kInter], bytes / kBytesPerMs, 1e-9);
  setting.network.latency_us = 50;  // two doublings, there and back, for 4 units
  EXPECT_NEAR(predict(setting, Contender::kAdamW).busy_ms[Lane::kInter],
              bytes / kBytesPerMs + 4 * 2 * 2 * 0.050, 1e-9);
}

TEST(Rates, AttentionGrowsWithTheSequence) {
  Setting setting = small_setting({1, 1});
  const double without = predict(setting, Contender::kDmuon).busy_ms[Lane::kCompute];
  for (double& flops : setting.training.attention_flops) flops = 2e3;
  const auto added = [&] {
    return predict(setting, Contender::kDmuon).busy_ms[Lane::kCompute] - without;
  };
  setting.training.sequence = 500;  // of 1000 tokens
  EXPECT_NEAR(added(), 3 * 4 * 1000 * 500 * 2e3 / 1e11, 1e-9);
  setting.training.sequence = 5000;
  EXPECT_NEAR(added(), 3 * 4 * 1000 * 1000 * 2e3 / 1e11, 1e-9);
}

TEST(Rates, AStepOfAnAcceleratorTakesNoLessThanItsHost) {
  Setting setting = small_setting({1, 1});
  setting.owned_host_ms = 100;
  setting.sharded_host_ms = 70;
  EXPECT_NEAR(predict(setting, Contender::kDmuon).step_ms, 5 * 100, 1e-9);
  EXPECT_NEAR(predict(setting, Contender::kAdamW).step_ms, 5 * 70, 1e-9);
}

// On CPUs hooks come on top, and messages inside the node take the modules' processors.
TEST(Rates, ACpuDoesEverythingItself) {
  plan::PlanOptions options;
  options.on_cpu = true;
  Setting setting = small_setting({1, 4}, 4, options);
  const Prediction dmuon = predict(setting, Contender::kDmuon);
  EXPECT_GT(dmuon.beside_ms, 0);
  EXPECT_EQ(predict(small_setting({1, 4}), Contender::kDmuon).beside_ms, 0);
  setting.owned_host_ms = 1;
  EXPECT_NEAR(predict(setting, Contender::kDmuon).step_ms, dmuon.step_ms + 5, 1e-9);
  // FSDP2 waits for each message.
  const Prediction adamw = predict(setting, Contender::kAdamW);
  EXPECT_NEAR(adamw.step_ms,
              adamw.busy_ms[Lane::kCompute] + adamw.busy_ms[Lane::kIntra] + adamw.adamw_ms, 1e-9);
}

TEST(Rates, MemoryIsStateAndWhatIsWhole) {
  Setting setting = small_setting({1, 4});
  constexpr double kUnit = 2e6;
  EXPECT_NEAR(predict(setting, Contender::kAdamW).memory_bytes,
              16 * kMatrices / 4 + kUnit * (2 * 2 + 4), 1);
  EXPECT_NEAR(predict(setting, Contender::kMuonAg).memory_bytes,
              12 * kMatrices / 4 + kUnit * (2 * 2 + 4), 1);
  EXPECT_EQ(predict(setting, Contender::kDmuon).memory_bytes,
            static_cast<double>(setting.plan.peak_bytes()));
  // Weights and gradients of the root group are whole at the end of a backward.
  setting.training.outside_elements = 100'000'000;
  constexpr double kOutsideBytes = 1e8 * (16.0 / 4 + 2 + 4);
  EXPECT_NEAR(predict(setting, Contender::kAdamW).memory_bytes, 16 * kMatrices / 4 + kOutsideBytes,
              1);
  EXPECT_NEAR(predict(setting, Contender::kDmuon).memory_bytes, 12 * kMatrices / 4 + kOutsideBytes,
              0.01 * kOutsideBytes);
}

// HSDP sums these gradients between nodes and sends no such weights there, whoever owns matrices.
TEST(Rates, ParametersOutsideOfMuonTravelAsUnderFsdp2) {
  for (const Contender contender : {Contender::kAdamW, Contender::kDmuon}) {
    Setting setting = small_setting({2, 2});
    const Prediction without = predict(setting, contender);
    setting.training.outside_elements = 4'000'000;
    const Prediction with = predict(setting, contender);
    const double bytes = 4e6 / 2 * 2 * 0.5 * 4;
    EXPECT_NEAR(with.inter_bytes - without.inter_bytes, bytes, 1e3) << name_of(contender);
    EXPECT_NEAR(with.busy_ms[Lane::kInter] - without.busy_ms[Lane::kInter], bytes / kBytesPerMs,
                1e-4)
        << name_of(contender);
  }
}

// On more than four CPU nodes owners send weights down a tree.
TEST(Rates, OfCpuNodesAreThoseOfAPlansWireTime) {
  plan::PlanOptions options;
  options.on_cpu = true;
  for (const int num_nodes : {2, 4, 5, 16}) {
    Setting setting = small_setting({num_nodes, 1}, 1, options);
    setting.network.gb_per_s = 0.001;  // beside which all other work is short
    const plan::WireTime wire = plan::wire_time(setting.plan, 1e6);
    const double expected_ms = wire.publish_ms + wire.route_ms;
    EXPECT_NEAR(predict(setting, Contender::kDmuon).busy_ms[Lane::kInter], expected_ms,
                0.01 * expected_ms)
        << num_nodes;
  }
}

// Half of a slot's bytes pass each of its two ranks; one adapter for both carries all of them.
TEST(Rates, RanksOfASlotShareTheirNodesAdapter) {
  Setting setting = small_setting({2, 1, 2});
  for (plan::Parameter& parameter : setting.plan.inventory) parameter.tensor_parallel = true;
  setting.plan.costs = plan::with_exchange(setting.plan.costs, setting.device, 2);
  const double apart = predict(setting, Contender::kAdamW).busy_ms[Lane::kInter];
  EXPECT_NEAR(apart, 2 * kMatrices / 2 * 4 / 2 / kBytesPerMs, 1e-9);
  setting.network.per_device = false;
  EXPECT_NEAR(predict(setting, Contender::kAdamW).busy_ms[Lane::kInter], 2 * apart, 1e-9);
  const double shared = predict(setting, Contender::kDmuon).busy_ms[Lane::kInter];
  setting.network.per_device = true;
  EXPECT_NEAR(shared, 2 * predict(setting, Contender::kDmuon).busy_ms[Lane::kInter], 1e-9);
}

TEST(Rates, EachRankTakesTheTimeOfItsOwnBatches) {
  const Setting setting = small_setting({1, 2}, 3);
  const Prediction dmuon = predict(setting, Contender::kDmuon);
  double sum = 0;
  for (const plan::Nanoseconds load : setting.plan.loads_ns) sum += plan::milliseconds(load);
  EXPECT_NEAR(dmuon.busy_ms[Lane::kUpdate], sum / 2, 1e-9);
}

TEST(Rates, APlanWithoutMatricesIsRefused) {
  Setting setting = small_setting({1, 1});
  setting.plan.inventory = {};
  EXPECT_THROW(predict(setting, Contender::kAdamW), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::predict
