// Predictions move the way they must.

#include <gtest/gtest.h>

#include "dmuon/predict/prediction.h"
#include "tests/predict/small_setting.h"

namespace dmuon::predict {
namespace {

double step_ms(const Setting& setting, Contender contender) {
  return predict(setting, contender).step_ms;
}

TEST(Directions, TwiceTheBandwidthBetweenNodesIsFaster) {
  for (const Contender contender : kContenders) {
    Setting setting = small_setting({2, 2});
    setting.network.gb_per_s = 1;
    const double slow = step_ms(setting, contender);
    setting.network.gb_per_s = 2;
    EXPECT_LT(step_ms(setting, contender), slow) << name_of(contender);
  }
}

TEST(Directions, TwiceTheBandwidthInsideANodeIsFaster) {
  for (const Contender contender : kContenders) {
    Setting setting = small_setting({1, 4});
    setting.device.link_gb_per_s = 10;
    const double slow = step_ms(setting, contender);
    setting.device.link_gb_per_s = 20;
    EXPECT_LT(step_ms(setting, contender), slow) << name_of(contender);
  }
}

TEST(Directions, HalfTheRateOfADeviceIsSlower) {
  for (const Contender contender : kContenders) {
    Setting setting = small_setting({1, 4});
    const double fast = step_ms(setting, contender);
    setting.device.training_tflops /= 2;
    EXPECT_GT(step_ms(setting, contender), fast) << name_of(contender);
  }
}

TEST(Directions, WithoutLookaheadMessagesAreNotHidden) {
  plan::PlanOptions options;
  Setting setting = small_setting({1, 4}, 4, options);
  setting.device.link_gb_per_s = 200;
  const Prediction ahead = predict(setting, Contender::kDmuon);
  options.lookahead = 0;
  Setting without = small_setting({1, 4}, 4, options);
  without.device.link_gb_per_s = 200;
  const Prediction demand = predict(without, Contender::kDmuon);
  EXPECT_GT(demand.step_ms, ahead.step_ms);
  EXPECT_LT(demand.hidden, ahead.hidden);
}

TEST(Directions, ANodeMoreHasLessToUpdate) {
  const Prediction two = predict(small_setting({2, 2}, 12), Contender::kDmuon);
  const Prediction three = predict(small_setting({3, 2}, 12), Contender::kDmuon);
  EXPECT_LT(three.update_ms, two.update_ms);
  EXPECT_LT(three.step_ms, two.step_ms);
  EXPECT_GE(predict(small_setting({3, 2}, 12), Contender::kMuonAg).update_ms, three.update_ms);
}

TEST(Directions, LateUpdatesHideBehindWaits) {
  Setting in_step = small_setting({2, 2}, 8);
  Setting late_one = small_setting({2, 2}, 8, late());
  for (Setting* setting : {&in_step, &late_one}) setting->network.gb_per_s = 2;
  EXPECT_LT(step_ms(late_one, Contender::kDmuon), step_ms(in_step, Contender::kDmuon));
}

// Whatever waits there are for late updates to hide behind.
TEST(Directions, AFasterLinkIsNeverSlower) {
  Setting setting = small_setting({2, 4}, 8, late());
  setting.training.outside_elements = 3'000'000;
  double before = 1e300;
  for (double gb_per_s = 1; gb_per_s < 5000; gb_per_s *= 1.5) {
    setting.device.link_gb_per_s = gb_per_s;
    const double now = step_ms(setting, Contender::kDmuon);
    EXPECT_LE(now, before + 1e-6) << gb_per_s;
    before = now;
  }
}

TEST(Directions, WithoutNodeCopiesMoreTravelsBetweenNodes) {
  plan::PlanOptions options;
  options.node_copy = false;
  EXPECT_GT(predict(small_setting({2, 2}, 4, options), Contender::kDmuon).inter_bytes,
            predict(small_setting({2, 2}), Contender::kDmuon).inter_bytes);
}

}  // namespace
}  // namespace dmuon::predict
