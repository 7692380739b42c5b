#include "dmuon/engine/profile.h"

#include <gtest/gtest.h>

namespace dmuon::engine {
namespace {

using schedule::Kind;

void add(Profile& profile, Kind kind, int unit, double issued, double started, double done) {
  profile.add({kind, unit, {issued, nullptr}, {started, nullptr}, {done, nullptr}});
}

TEST(Profile, CountsEachKindAndItsLaneAlways) {
  Profile profile(c10::kCPU);
  add(profile, Kind::kPublishIntra, 0, 0, 1, 3);
  add(profile, Kind::kPublishIntra, 1, 0, 3, 3.5);
  add(profile, Kind::kRouteIntra, 0, 0, 4, 5);
  add(profile, Kind::kRouteInter, 0, 0, 5, 9);
  add(profile, Kind::kUpdate, 0, 9, 9, 100);  // compute's own affair
  const auto seconds = profile.seconds();
  EXPECT_EQ(seconds.at("publish_intra_s"), 2.5);
  EXPECT_EQ(seconds.at("publish_inter_s"), 0);
  EXPECT_EQ(seconds.at("route_intra_s"), 1);
  EXPECT_EQ(seconds.at("busy_intra_s"), 3.5);
  EXPECT_EQ(seconds.at("busy_inter_s"), 4);
  EXPECT_FALSE(seconds.contains("update_s"));
}

TEST(Profile, CountsTheWaitsOfComputeByPhase) {
  Profile profile(c10::kCPU);
  add(profile, Kind::kAwaitWeights, 0, 0, 0, 1);
  profile.set_phase(Phase::kBackward);
  add(profile, Kind::kReshard, 0, 0, 1, 3);
  add(profile, Kind::kRouteIntra, 0, 0, 1, 50);  // on a lane: nobody waits
  profile.set_phase(Phase::kStep);
  add(profile, Kind::kFinishRouteIntra, 0, 0, 3, 7);
  const auto seconds = profile.seconds();
  EXPECT_EQ(seconds.at("wait_forward_s"), 1);
  EXPECT_EQ(seconds.at("wait_backward_s"), 2);
  EXPECT_EQ(seconds.at("wait_step_s"), 4);
}

TEST(Profile, KeepsOperationsWhileItRecords) {
  Profile profile(c10::kCPU);
  add(profile, Kind::kUpdate, 7, 0, 1, 2);
  profile.start();
  add(profile, Kind::kReshard, 3, 1, 2, 4);
  add(profile, Kind::kUpdate, 5, 4, 4, 6);
  const auto spans = profile.stop();
  add(profile, Kind::kUpdate, 8, 6, 6, 7);
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0].kind, Kind::kReshard);
  EXPECT_EQ(spans[0].unit, 3);
  EXPECT_EQ(spans[1].unit, 5);
  EXPECT_EQ(spans[1].done, 6);
  EXPECT_TRUE(profile.stop().empty());
  profile.start();
  EXPECT_TRUE(profile.stop().empty());
}

}  // namespace
}  // namespace dmuon::engine
