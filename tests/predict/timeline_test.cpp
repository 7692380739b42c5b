#include "dmuon/predict/timeline.h"

#include <gtest/gtest.h>

#include <tuple>

namespace dmuon::predict {
namespace {

using schedule::Kind;
using schedule::Lane;
using simulate::Compute;
using simulate::SimulatedSpan;

// Two steps of one unit. In the second step compute waits for weights from 10 to 16: while the lane
// inside the node is busy from 14, that between nodes from 12 to 15, and an update from 11 to 13.
struct OneRank {
  simulate::Program program;
  std::vector<SimulatedSpan> timeline;

  void add(int event, Kind kind, Lane lane, double issued, double start, double end) {
    program.issues.push_back({.compute = {}, .operation = {.kind = kind}, .event = event});
    if (schedule::is_on_batch(kind)) program.issues.back().operation.subject = core::BatchIndex(0);
    timeline.push_back({program.num_issues() - 1, lane, issued, start, end});
  }
  void compute(int event, Compute what, double start, double end) {
    program.issues.push_back({.compute = what, .operation = {}, .event = event});
    timeline.push_back({program.num_issues() - 1, Lane::kCompute, start, start, end});
  }
};

std::vector<Awaited> no_causes(const SimulatedSpan&) { return {}; }

OneRank one_rank() {
  OneRank rank;
  rank.compute(0, Compute::kForward, 0, 3);
  rank.compute(1, Compute::kBackward, 3, 9);
  rank.add(2, Kind::kOrthogonalise, Lane::kUpdate, 9, 11, 13);
  rank.add(2, Kind::kFinishUpdate, Lane::kCompute, 9, 10, 10);
  rank.add(3, Kind::kPublishInter, Lane::kInter, 10, 12, 15);
  rank.add(3, Kind::kPublishIntra, Lane::kIntra, 10, 14, 16);
  rank.add(3, Kind::kAwaitWeights, Lane::kCompute, 10, 16, 16);
  rank.compute(3, Compute::kForward, 16, 19);
  rank.add(4, Kind::kOrthogonalise, Lane::kUpdate, 19, 20, 22);
  rank.compute(4, Compute::kBackward, 19, 25);
  rank.add(5, Kind::kFinishUpdate, Lane::kCompute, 25, 25, 25);
  return rank;
}

// Whatever lanes do meanwhile.
TEST(Measure, AWaitCountsForWhatItWaitsFor) {
  const OneRank rank = one_rank();
  const auto why = [](const SimulatedSpan& span) -> std::vector<Awaited> {
    if (span.end_us != 16) return {};
    return {{Cause::kPeers, 10, 10.5}, {Cause::kUpdate, 10.5, 15}, {Cause::kIntra, 15, 16}};
  };
  const RankStep step = measure(rank.program, rank.timeline, 1, {}, why);
  EXPECT_EQ(step.elapsed_us[Phase::kForward], 9);
  const PerCause<double>& waits = step.waits_us[Phase::kForward];
  EXPECT_EQ(waits[Cause::kIntra], 1);
  EXPECT_EQ(waits[Cause::kInter], 0);
  EXPECT_EQ(waits[Cause::kUpdate], 4.5);
  EXPECT_EQ(waits[Cause::kPeers], 0.5);
}

// A wait of rank 0 from 1 to 7, for an update of rank 1 that begins when its module has ended.
TEST(CriticalCauses, AreThoseOfTheLanesOnThePath) {
  OneRank waits;
  waits.add(0, Kind::kPublishIntra, Lane::kIntra, 1, 1, 7);
  waits.add(0, Kind::kAwaitWeights, Lane::kCompute, 1, 7, 7);
  OneRank late;
  late.compute(0, Compute::kBackward, 0, 2);
  late.add(0, Kind::kGather, Lane::kSlices, 2, 2, 3);
  late.add(0, Kind::kOrthogonalise, Lane::kUpdate, 3, 3, 4);
  late.add(0, Kind::kPublishInter, Lane::kInter, 4, 4, 6);
  late.add(0, Kind::kPublishIntra, Lane::kIntra, 6, 6, 7);
  const simulate::Programs programs{waits.program, late.program};
  simulate::Execution execution;
  execution.origins = {{{-1, 1, 7, {{0, {6, core::Owner(1), 4, 0}}}}, {0, 7, 7}},
                       {{-1, 0, 2}, {0, 2, 3}, {1, 3, 4}, {2, 4, 6}, {3, 6, 7}}};
  const auto wait = critical_causes(programs, execution, core::Owner(0))(waits.timeline.back());
  const std::vector<std::tuple<Cause, double, double>> expected{{Cause::kPeers, 1, 2},
                                                                {Cause::kUpdate, 2, 3},
                                                                {Cause::kUpdate, 3, 4},
                                                                {Cause::kInter, 4, 6},
                                                                {Cause::kIntra, 6, 7}};
  ASSERT_EQ(wait.size(), expected.size());
  for (std::size_t i = 0; i < wait.size(); ++i)
    EXPECT_EQ(std::tuple(wait[i].cause, wait[i].begin_us, wait[i].end_us), expected[i]);
}

TEST(Measure, AnUpdateBesideModulesSharesTheirDevice) {
  const RankStep step = measure(one_rank().program, one_rank().timeline, 1, {}, no_causes);
  EXPECT_EQ(step.beside_us[Phase::kForward][Lane::kUpdate], 0);
  EXPECT_EQ(step.beside_us[Phase::kBackward][Lane::kUpdate], 2);
  EXPECT_EQ(step.busy_us[Phase::kBackward][Lane::kUpdate], 2);
  EXPECT_EQ(step.busy_us[Phase::kForward][Lane::kCompute], 3);
}

// Messages travel from 12 to 16, and compute waits for weights all the time.
TEST(Measure, CountsMessagesThatComputeWaitsFor) {
  const OneRank rank = one_rank();
  const RankStep step = measure(rank.program, rank.timeline, 1, {}, no_causes);
  EXPECT_EQ(step.messages_us, 4);
  EXPECT_EQ(step.awaited_us, 4);
  EXPECT_EQ(step.waits_us[Phase::kForward][Cause::kOutside], 0);
}

TEST(Measure, AWaitForAnUpdateIsNoneForMessages) {
  OneRank rank = one_rank();
  rank.add(5, Kind::kPublishInter, Lane::kInter, 25, 25, 28);
  rank.add(5, Kind::kFinishUpdate, Lane::kCompute, 25, 28, 28);
  const RankStep step = measure(rank.program, rank.timeline, 1, {}, no_causes);
  EXPECT_EQ(step.messages_us, 4 + 3);
  EXPECT_EQ(step.awaited_us, 4);
}

TEST(Measure, MessagesOfFsdp2AreNotTheEngines) {
  const OneRank rank = one_rank();
  const RankStep step =
      measure(rank.program, rank.timeline, 1, {.fsdp2_unit = core::UnitIndex(0)}, no_causes);
  EXPECT_EQ(step.messages_us, 0);
  EXPECT_EQ(step.awaited_us, 0);
  EXPECT_EQ(step.waits_us[Phase::kForward][Cause::kOutside], 6);
  EXPECT_EQ(step.waits_us[Phase::kForward][Cause::kIntra], 0);
}

TEST(Measure, AHostThatWaitsInAModuleWaitsForFsdp2) {
  const OneRank rank = one_rank();
  const auto blocked_us = [](const simulate::Issue& issue) {
    return issue.is(Compute::kBackward) ? 2.0 : 0.0;
  };
  const RankStep step =
      measure(rank.program, rank.timeline, 1, {.blocked_us = blocked_us}, no_causes);
  EXPECT_EQ(step.waits_us[Phase::kBackward][Cause::kOutside], 2);
  EXPECT_EQ(step.busy_us[Phase::kBackward][Lane::kCompute], 4);
}

// An update holds up a module from 3 to 4; on CPUs messages inside the node do from 2 on. Then the
// module waits, beside the update until 7, for a lane between nodes until 8 and one inside until 9.
TEST(Measure, SlackIsWaitsForMessagesAfterWorkThatHeldUpModules) {
  OneRank rank = one_rank();
  rank.timeline.clear();
  rank.program.issues.clear();
  rank.compute(0, Compute::kForward, 0, 1);
  rank.compute(1, Compute::kBackward, 1, 1);
  rank.compute(2, Compute::kBackward, 1, 1);
  rank.add(3, Kind::kPublishIntra, Lane::kIntra, 1, 2, 3);
  rank.add(3, Kind::kOrthogonalise, Lane::kUpdate, 1, 3, 7);
  rank.compute(3, Compute::kForward, 1, 4);
  rank.add(3, Kind::kPublishInter, Lane::kInter, 4, 6, 8);
  rank.add(3, Kind::kPublishIntra, Lane::kIntra, 4, 8, 9);
  rank.add(3, Kind::kAwaitWeights, Lane::kCompute, 4, 9, 9);
  rank.compute(3, Compute::kForward, 9, 10);
  rank.compute(4, Compute::kBackward, 10, 11);
  rank.compute(5, Compute::kBackward, 11, 11);
  const auto slack_us = [&](bool on_cpu) {
    return measure(rank.program, rank.timeline, 1, {.on_cpu = on_cpu}, no_causes)
        .slack_us[Phase::kForward];
  };
  EXPECT_EQ(slack_us(false), 2);
  EXPECT_EQ(slack_us(true), 2);
  // Without the update only messages hold modules up, and only on CPUs.
  rank.timeline[4].start_us = rank.timeline[4].end_us = 1;
  EXPECT_EQ(slack_us(false), 0);
  EXPECT_EQ(slack_us(true), 3);
}

// The forward's modules wait for 3 us less. A backward's wait as long as before.
TEST(HeldUpIn, ForwardsMakeUpForWhatHoldsThemUp) {
  RankStep step;
  step.beside_us[Phase::kForward][Lane::kUpdate] = 5;
  step.beside_us[Phase::kForward][Lane::kIntra] = 2;
  step.slack_us[Phase::kForward] = 3;
  step.beside_us[Phase::kBackward][Lane::kUpdate] = 4;
  step.beside_us[Phase::kBackward][Lane::kIntra] = 1;
  step.slack_us[Phase::kBackward] = 10;
  const HeldUp of_device = held_up_in(step, false);
  EXPECT_EQ(of_device.all_us, 5 - 3 + 4);
  EXPECT_EQ(of_device.update_us, 5 - 3 + 4);
  EXPECT_EQ(of_device.spared_us, 3);
  const HeldUp of_cpu = held_up_in(step, true);
  EXPECT_EQ(of_cpu.all_us, 5 + 2 - 3 + 4 + 1);
  EXPECT_EQ(of_cpu.update_us, 5 - 3 + 4);
  EXPECT_EQ(of_cpu.spared_us, 3);
  step.slack_us[Phase::kForward] = 100;
  EXPECT_EQ(held_up_in(step, true).spared_us, 5 + 2);
}

TEST(SpansOf, CountFromTheBeginOfTheStep) {
  const OneRank rank = one_rank();
  const std::vector<SimulatedSpan> spans = spans_of(rank.program, rank.timeline, 1);
  ASSERT_EQ(spans.size(), 8u);
  EXPECT_EQ(spans.front().end_us, 3);  // the update, which began in the step before
  EXPECT_EQ(spans[6].start_us, 9);
  EXPECT_EQ(spans[6].end_us, 15);
}

}  // namespace
}  // namespace dmuon::predict
