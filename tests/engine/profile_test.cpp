#include "dmuon/engine/profile.h"

#include <gtest/gtest.h>

namespace dmuon::engine {
namespace {

using schedule::Kind;

schedule::Subject subject_of(Kind kind, int index) {
  if (schedule::is_on_batch(kind)) return core::BatchIndex(index);
  return core::UnitIndex(index);
}

void add(Profile& profile, Kind kind, int index, double issued, double started, double done) {
  profile.add(
      {kind, subject_of(kind, index), {issued, nullptr}, {started, nullptr}, {done, nullptr}});
}

TEST(Profile, CountsEachKindAndItsLaneAlways) {
  Profile profile(c10::kCPU);
  add(profile, Kind::kPublishIntra, 0, 0, 1, 3);
  add(profile, Kind::kPublishIntra, 1, 0, 3, 3.5);
  add(profile, Kind::kRouteIntra, 0, 0, 4, 5);
  add(profile, Kind::kRouteInter, 0, 0, 5, 9);
  add(profile, Kind::kPrepare, 0, 9, 9, 10);
  add(profile, Kind::kOrthogonalise, 0, 9, 10, 16);
  add(profile, Kind::kFinishUpdate, 0, 9, 9, 100);  // compute waits
  const auto seconds = profile.seconds();
  EXPECT_EQ(seconds.at("publish_intra_s"), 2.5);
  EXPECT_EQ(seconds.at("publish_inter_s"), 0);
  EXPECT_EQ(seconds.at("route_intra_s"), 1);
  EXPECT_EQ(seconds.at("busy_intra_s"), 3.5);
  EXPECT_EQ(seconds.at("busy_inter_s"), 4);
  EXPECT_EQ(seconds.at("orthogonalise_s"), 6);
  EXPECT_EQ(seconds.at("busy_update_s"), 7);
  EXPECT_FALSE(seconds.contains("finish_update_s"));
}

TEST(Profile, CountsTheWaitsOfComputeByPhase) {
  Profile profile(c10::kCPU);
  add(profile, Kind::kAwaitWeights, 0, 0, 0, 1);
  profile.set_phase(Phase::kBackward);
  add(profile, Kind::kReshard, 0, 0, 1, 3);
  add(profile, Kind::kRouteIntra, 0, 0, 1, 50);  // on a lane: nobody waits
  profile.set_phase(Phase::kStep);
  add(profile, Kind::kFinishRouteIntra, 0, 0, 3, 7);
  add(profile, Kind::kFinishUpdate, 0, 7, 7, 20);  // no wait for messages
  const auto seconds = profile.seconds();
  EXPECT_EQ(seconds.at("wait_forward_s"), 1);
  EXPECT_EQ(seconds.at("wait_backward_s"), 2);
  EXPECT_EQ(seconds.at("wait_step_s"), 4);
}

TEST(Profile, KeepsOperationsWhileItRecords) {
  Profile profile(c10::kCPU);
  add(profile, Kind::kApply, 7, 0, 1, 2);
  profile.start();
  add(profile, Kind::kReshard, 3, 1, 2, 4);
  add(profile, Kind::kApply, 5, 4, 4, 6);
  const auto spans = profile.stop();
  add(profile, Kind::kApply, 8, 6, 6, 7);
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0].kind, Kind::kReshard);
  EXPECT_EQ(spans[0].subject, subject_of(Kind::kReshard, 3));
  EXPECT_EQ(spans[1].subject, subject_of(Kind::kApply, 5));
  EXPECT_EQ(spans[1].done, 6);
  EXPECT_TRUE(profile.stop().empty());
  profile.start();
  EXPECT_TRUE(profile.stop().empty());
}

}  // namespace
}  // namespace dmuon::engine
