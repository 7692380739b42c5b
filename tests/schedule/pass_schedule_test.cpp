// What a pass issues, trigger by trigger.

#include <gtest/gtest.h>

#include <utility>

#include "dmuon/schedule/step_schedule.h"
#include "tests/schedule/three_units.h"

namespace dmuon::schedule {
namespace {

using Steps = std::vector<std::string>;  // one a trigger

Steps text_of(const PassSchedule& pass) {
  Steps steps;
  for (const auto& operations : pass) steps.push_back(text_of(operations));
  return steps;
}

Steps forward_on(const Layout& layout, const StepOptions& options, const Trace& trace = kForward) {
  return text_of(build_pass_schedule(layout, {}, trace, trace, Pass::kTrainForward, options));
}

Steps backward_on(const Layout& layout, const StepOptions& options, bool sync = true) {
  return text_of(
      build_pass_schedule(layout, {}, kBackward, kForward, Pass::kBackward, options, sync));
}

TEST(PassSchedule, WithoutLookaheadSendsWhatIsNeededWhenItIsNeeded) {
  const StepOptions options{.lookahead = 0};
  const Steps forward{"publish inter 0, publish intra 0, await weights 0", "reshard 0",
                      "publish inter 1, publish intra 1, await weights 1", "reshard 1",
                      "publish inter 2, publish intra 2, await weights 2"};
  EXPECT_EQ(forward_on(three_units(2, 2), options), forward);
  const auto route = [](int unit) {
    return core::message("route intra ", unit, ", route inter ", unit, ", finish route intra ",
                         unit, ", finish route inter ", unit);
  };
  const Steps backward{"publish intra 2, await weights 2", "reshard 2, " + route(2),
                       "publish intra 1, await weights 1", "reshard 1, " + route(1),
                       "publish intra 0, await weights 0", "reshard 0, " + route(0)};
  EXPECT_EQ(backward_on(three_units(2, 2), options), backward);
}

TEST(PassSchedule, SendsStage1LookaheadUsesAheadAndStage2OneUseAhead) {
  const Steps one{
      "publish inter 0, publish inter 1, publish intra 0, publish intra 1, "
      "await weights 0",
      "reshard 0", "publish inter 2, publish intra 2, await weights 1", "reshard 1",
      "await weights 2"};
  EXPECT_EQ(forward_on(three_units(2, 2), {.lookahead = 1}), one);
  const Steps two{
      "publish inter 0, publish inter 1, publish inter 2, publish intra 0, "
      "publish intra 1, await weights 0",
      "reshard 0", "publish intra 2, await weights 1", "reshard 1", "await weights 2"};
  EXPECT_EQ(forward_on(three_units(2, 2), {.lookahead = 2}), two);
}

TEST(PassSchedule, LeavesOutStage1WhereThereIsOneReplicate) {
  const Steps forward{"publish intra 0, publish intra 1, await weights 0", "reshard 0",
                      "publish intra 2, await weights 1", "reshard 1", "await weights 2"};
  for (const bool node_copy : {false, true})
    EXPECT_EQ(forward_on(three_units(1, 4), {.node_copy = node_copy, .lookahead = 2}), forward);
  for (const std::string& step : backward_on(three_units(1, 4), {}))
    EXPECT_EQ(step.find("inter"), std::string::npos) << step;
}

TEST(PassSchedule, SendsTheNextWeightsBeforeTheGradientsAndFreesWhatHasTravelled) {
  const Steps many_in_stage_2{"publish intra 2, publish intra 1, await weights 2",
                              "reshard 2, route intra 2, route inter 2",
                              "publish intra 0, await weights 1",
                              "reshard 1, finish route intra 2, route intra 1, route inter 1",
                              "await weights 0",
                              "reshard 0, finish route intra 1, route intra 0, route inter 0"};
  EXPECT_EQ(backward_on(three_units(2, 2), {.lookahead = 2}), many_in_stage_2);
  const Steps two_in_stage_2{
      "publish intra 2, publish intra 1, await weights 2",
      "reshard 2, route intra 2, route inter 2",
      "publish intra 0, await weights 1",
      "reshard 1, finish route intra 2, route intra 1, route inter 1",
      "await weights 0",
      "reshard 0, finish route intra 1, finish route inter 2, route intra 0, route inter 0"};
  EXPECT_EQ(backward_on(three_units(2, 2), {.lookahead = 1}), two_in_stage_2);
  Layout one_column = three_units(2, 2);
  for (UnitLayout& unit : one_column.units) unit.owner_elements = {8, 0, 0, 0};
  EXPECT_EQ(backward_on(one_column, {.lookahead = 2}), two_in_stage_2);
}

TEST(PassSchedule, KeepsGradientsOfANodeUnderNoSync) {
  const Steps backward{"publish intra 2, publish intra 1, await weights 2",
                       "reshard 2, route intra 2",
                       "publish intra 0, await weights 1",
                       "reshard 1, finish route intra 2, route intra 1",
                       "await weights 0",
                       "reshard 0, finish route intra 1, route intra 0"};
  EXPECT_EQ(backward_on(three_units(2, 2), {}, /*sync=*/false), backward);
}

TEST(PassSchedule, SendsBothStagesAtEveryUseWithoutNodeCopies) {
  const StepOptions options{.node_copy = false, .lookahead = 2};
  const Steps backward{
      "publish inter 2, publish inter 1, publish inter 0, publish intra 2, "
      "publish intra 1, await weights 2",
      "reshard 2, route intra 2, route inter 2",
      "publish intra 0, await weights 1",
      "reshard 1, finish route intra 2, route intra 1, route inter 1",
      "await weights 0",
      "reshard 0, finish route intra 1, finish route inter 2, route intra 0, route inter 0"};
  EXPECT_EQ(backward_on(three_units(2, 2), options), backward);
}

TEST(PassSchedule, SendsStage1OnceAVersionWithNodeCopies) {
  const Trace twice{before_use(0), after_forward(0), before_use(1), after_forward(1),
                    before_use(0)};
  const Steps forward{
      "publish inter 0, publish inter 1, publish intra 0, publish intra 1, "
      "await weights 0",
      "reshard 0", "publish intra 0, await weights 1", "reshard 1", "await weights 0"};
  EXPECT_EQ(forward_on(three_units(2, 1), {}, twice), forward);
  // A backward's units of which the forward knew nothing.
  const PassSchedule backward = build_pass_schedule(
      three_units(2, 1), {}, {before_use(1), after_backward(1), before_use(2), after_backward(2)},
      {before_use(1)}, Pass::kBackward, {});
  EXPECT_EQ(text_of(backward[0]),
            "publish inter 2, publish intra 1, publish intra 2, await weights 1");
}

TEST(PassSchedule, DoesNotFillABufferBeforeItIsFree) {
  const Trace twice{before_use(0), after_forward(0), before_use(0), after_forward(0)};
  const Steps forward{"publish inter 0, publish intra 0, await weights 0",
                      "reshard 0, publish inter 0, publish intra 0", "await weights 0",
                      "reshard 0"};
  EXPECT_EQ(forward_on(three_units(2, 2), {.node_copy = false}, twice), forward);
}

TEST(PassSchedule, RoutesAUnitThatIsUsedTwiceOnce) {
  const Trace twice{before_use(0),     after_backward(0), before_use(1),
                    after_backward(1), before_use(0),     after_backward(0)};
  const Steps backward =
      text_of(build_pass_schedule(three_units(1, 2), {}, twice, kForward, Pass::kBackward, {}));
  EXPECT_EQ(backward[1], "reshard 0");
  EXPECT_EQ(backward[5], "reshard 0, route intra 0");
}

// The forward's last reshard is not in its trace, so the publication does nothing.
TEST(PassSchedule, BeginsABackwardWithTheUnitThatTheForwardKept) {
  const Steps forward = forward_on(three_units(1, 2), {});
  for (const std::string& step : forward) EXPECT_EQ(step.find("reshard 2"), std::string::npos);
  EXPECT_EQ(backward_on(three_units(1, 2), {.lookahead = 0})[0],
            "publish intra 2, await weights 2");
}

// 4 and 4 bytes an element: two units grant 128 bytes, of which 64 are two units' weights.
TEST(PassSchedule, HasAsManyRoutesInFlightAsMemoryAllows) {
  const Steps backward = backward_on(three_units(1, 2), {.lookahead = 2, .max_units_in_flight = 2});
  EXPECT_EQ(backward[1], "reshard 2, route intra 2, finish route intra 2");
}

// Four units and the window of three: 4 * 64 bytes, of which 2 * 32 are weights and 3 * 32
// gradients of one in its backward and one in stage 1, which leaves 96 for nodes' means of 16 and
// inboxes.
TEST(PassSchedule, HasAsManyNodesMeansInFlightAsMemoryAllows) {
  Layout layout = three_units(2, 2);
  layout.units.push_back(layout.units.front());
  Trace backward;
  for (const int unit : {3, 2, 1, 0})
    backward.insert(backward.end(), {before_use(unit), after_backward(unit)});
  const auto last = [&](int max_units_in_flight) {
    const StepOptions options{.lookahead = 2, .max_units_in_flight = max_units_in_flight};
    return text_of(
        build_pass_schedule(layout, {}, backward, kForward, Pass::kBackward, options).back());
  };
  EXPECT_EQ(last(4),
            "reshard 0, finish route intra 1, finish route inter 3, route intra 0, "
            "route inter 0");
  EXPECT_EQ(last(5), "reshard 0, finish route intra 1, route intra 0, route inter 0");
}

// Two units grant no room for a route in stage 1, so none is in stage 2.
TEST(PassSchedule, HasNoNodesMeansInFlightWithoutRoomForGradients) {
  const Steps backward = backward_on(three_units(2, 2), {.lookahead = 2, .max_units_in_flight = 2});
  EXPECT_EQ(backward[1],
            "reshard 2, route intra 2, route inter 2, finish route intra 2, finish route inter 2");
}

// Each unit has another column: a column member holds 32 bytes of one unit, and an inbox.
TEST(PassSchedule, HasMoreNodesMeansInFlightIfTheyAreOfDifferentColumns) {
  Layout layout = three_units(2, 4);
  layout.units.push_back(layout.units.front());
  Trace backward;
  for (const int unit : {3, 2, 1, 0}) {
    backward.insert(backward.end(), {before_use(unit), after_backward(unit)});
    UnitLayout& drawn = layout.units[core::UnitIndex(unit)];
    drawn.owner_elements = {0, 0, 0, 0, 0, 0, 0, 0};
    drawn.owner_elements[core::Slot(unit)] = 8;
  }
  const auto last = [&] {
    const StepOptions options{.lookahead = 2, .max_units_in_flight = 4};
    return text_of(
        build_pass_schedule(layout, {}, backward, kForward, Pass::kBackward, options).back());
  };
  EXPECT_EQ(last(), "reshard 0, finish route intra 1, route intra 0, route inter 0");
  std::swap(layout.units[core::UnitIndex(0)].owner_elements[core::Slot(0)],
            layout.units[core::UnitIndex(0)].owner_elements[core::Slot(3)]);
  EXPECT_EQ(last(),
            "reshard 0, finish route intra 1, finish route inter 3, route intra 0, "
            "route inter 0");
}

TEST(PassSchedule, NamesWhatEachOperationWaitsFor) {
  const PassSchedule forward = build_pass_schedule(three_units(2, 2), {}, kForward, kForward,
                                                   Pass::kTrainForward, {.lookahead = 0});
  using After = std::vector<Dependency>;
  const core::UnitIndex first(0);
  EXPECT_EQ(forward[0][0].after, After{});
  EXPECT_EQ(forward[0][1].after, (After{{Kind::kPublishInter, first}}));
  EXPECT_EQ(forward[0][2].after, (After{{Kind::kPublishIntra, first}}));
  EXPECT_EQ(forward[1][0].after,
            (After{{Kind::kPublishIntra, first}, {Kind::kPublishInter, first}}));
  for (const bool sync : {false, true}) {
    const PassSchedule backward = build_pass_schedule(three_units(2, 2), {}, kBackward, kForward,
                                                      Pass::kBackward, {.lookahead = 0}, sync);
    const Operation& finish = backward[1].back();
    EXPECT_EQ(finish.kind, sync ? Kind::kFinishRouteInter : Kind::kFinishRouteIntra);
    const Kind last = sync ? Kind::kRouteInter : Kind::kRouteIntra;
    EXPECT_EQ(finish.after, (After{{last, core::UnitIndex(2)}}));
  }
}

// Where nothing goes between nodes there is nothing to hold back.
TEST(PassSchedule, SaysWhichRoutesStayAtTheColumnMembers) {
  for (const auto& [num_replicates, sync] : {std::pair{1, false}, {2, false}, {2, true}}) {
    const PassSchedule backward = build_pass_schedule(three_units(num_replicates, 2), {}, kBackward,
                                                      kForward, Pass::kBackward, {}, sync);
    for (const std::vector<Operation>& operations : backward) {
      for (const Operation& operation : operations) {
        const bool held = num_replicates > 1 && !sync && operation.kind == Kind::kRouteIntra;
        EXPECT_EQ(operation.hold, held) << text_of(operation);
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::schedule
