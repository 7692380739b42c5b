#include "dmuon/schedule/step_schedule.h"

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "dmuon/schedule/maker.h"
#include "tests/schedule/three_units.h"

namespace dmuon::schedule {
namespace {

TEST(UpdateSchedule, PublishesInForwardOrderAsSoonAsAUnitIsUpdated) {
  const Batches batches = batches_of({{2}, {1}, {0, 2}});
  const std::string freed = "reshard 0, reshard 1, reshard 2, ";
  const auto step = [&](const Layout& layout, const StepOptions& options) {
    return text_of(build_update_schedule(layout, batches, kForward, options));
  };
  const std::string updates = update(2) + ", " + update(1) + ", " + update(0);
  EXPECT_EQ(step(three_units(2, 2), {.lookahead = 1}),
            freed + updates +
                ", finish update 2, publish inter 0, publish intra 0, finish update 1, "
                "publish inter 1, finish update 0, publish inter 2");
  EXPECT_EQ(step(three_units(2, 2), {.node_copy = false, .lookahead = 2}),
            freed + updates +
                ", finish update 2, publish inter 0, publish intra 0, finish update 1, "
                "publish inter 1, finish update 0");
  EXPECT_EQ(
      step(three_units(1, 2), {.lookahead = 2}),
      freed + updates + ", finish update 2, publish intra 0, finish update 1, finish update 0");
  EXPECT_EQ(step(three_units(2, 2), {.lookahead = 0}),
            freed + updates + ", finish update 2, finish update 1, finish update 0");
  for (const Operation& operation :
       build_update_schedule(three_units(2, 2), batches, kForward, {})) {
    EXPECT_EQ(operation.version, operation.kind == Kind::kReshard ? 0 : 1);
  }
}

TEST(UpdateSchedule, SendsBothStagesOfAllUnitsOfReplicatedWeights) {
  const Batches batches = batches_of({{2}, {1}, {0, 2}});
  const auto step = [&](int num_replicates) {
    return text_of(build_update_schedule(
        three_units(num_replicates, 2), batches, kForward,
        {.node_copy = false, .lookahead = 0, .reshard_after_forward = false, .replicated = true}));
  };
  const std::string begin =
      "reshard 0, reshard 1, reshard 2, " + update(2) + ", " + update(1) + ", " + update(0);
  EXPECT_EQ(step(1), begin +
                         ", finish update 2, publish intra 0, finish update 1, publish intra 1"
                         ", finish update 0, publish intra 2");
  EXPECT_EQ(step(2), begin +
                         ", finish update 2, publish inter 0, publish intra 0, "
                         "finish update 1, publish inter 1, publish intra 1, finish update 0, "
                         "publish inter 2, publish intra 2");
}

TEST(UpdateSchedule, WaitsForNoBatchIfUpdatesAreLate) {
  const Batches batches = batches_of({{2}, {1}, {0, 2}});
  const auto step = [&](const Layout& layout, const StepOptions& options) {
    return text_of(build_update_schedule(layout, batches, kForward, options));
  };
  const std::string begin =
      "reshard 0, reshard 1, reshard 2, " + update(2) + ", " + update(1) + ", " + update(0);
  EXPECT_EQ(step(three_units(2, 2), {.late_updates = true}),
            begin + ", publish inter 0, publish intra 0, publish inter 1, publish inter 2");
  EXPECT_EQ(step(three_units(1, 2), {.late_updates = true}), begin + ", publish intra 0");
  EXPECT_EQ(step(three_units(2, 2), {.lookahead = 0, .late_updates = true}), begin);
}

// Batch 0 touches unit 2, batch 1 unit 1, batch 2 units 0 and 2.
TEST(UpdateSchedule, LetsPublicationsWaitForTheBatchesThatCompleteTheirUnit) {
  const Batches batches = batches_of({{2, 2}, {1}, {0, 2}});
  using After = std::vector<Dependency>;
  const auto apply = [](int batch) { return Dependency{Kind::kApply, core::BatchIndex(batch)}; };
  const After expected[] = {{apply(2)}, {apply(1)}, {apply(0), apply(2)}};
  for (const int num_replicates : {1, 2}) {
    const Layout layout = three_units(num_replicates, 2);
    const Kind first_stage = num_replicates == 1 ? Kind::kPublishIntra : Kind::kPublishInter;
    int found = 0;
    const auto check = [&](const std::vector<Operation>& operations) {
      for (const Operation& operation : operations) {
        if (operation.kind != first_stage) continue;
        EXPECT_EQ(operation.after, expected[operation.unit().value()]) << text_of(operation);
        ++found;
      }
    };
    check(build_update_schedule(layout, batches, kForward, {}));
    check(serve_on_demand(layout, Maker(layout, batches), before_use(2)));
    for (const auto& operations :
         build_pass_schedule(layout, batches, kForward, kForward, Pass::kTrainForward, {}))
      check(operations);
    EXPECT_GE(found, 5);
  }
  const std::vector<Operation> step = build_update_schedule(three_units(1, 2), batches, {}, {});
  EXPECT_EQ(step.back().after, (After{apply(2)}));
  EXPECT_EQ(step.back().kind, Kind::kFinishUpdate);
  for (const Operation& operation : step) {  // each of the three needs the one before
    if (operation.kind != Kind::kOrthogonalise && operation.kind != Kind::kApply) continue;
    const Kind before = operation.kind == Kind::kApply ? Kind::kOrthogonalise : Kind::kPrepare;
    EXPECT_EQ(operation.after, (After{{before, operation.batch()}}));
  }
}

TEST(UpdateSchedule, RefusesBatchesOfUnitsThatTheLayoutLacks) {
  EXPECT_THROW(build_update_schedule(three_units(1, 2), batches_of({{3}}), kForward, {}),
               core::InvalidArgument);
}

TEST(ServeOnDemand, IssuesEverythingThatATriggerNeeds) {
  const auto serve = [](const Layout& layout, Trigger trigger, bool sync = true) {
    return text_of(serve_on_demand(layout, Maker(layout, {}), trigger, sync));
  };
  EXPECT_EQ(serve(three_units(1, 2), before_use(1)), "publish intra 1, await weights 1");
  EXPECT_EQ(serve(three_units(2, 2), before_use(1)),
            "publish inter 1, publish intra 1, await weights 1");
  EXPECT_EQ(serve(three_units(2, 2), after_forward(1)), "reshard 1");
  EXPECT_EQ(serve(three_units(2, 2), after_backward(1)),
            "reshard 1, route intra 1, route inter 1, finish route intra 1, finish route inter 1");
  EXPECT_EQ(serve(three_units(2, 2), after_backward(1), false),
            "reshard 1, route intra 1, finish route intra 1");
}

TEST(StepOptions, OutOfRangeAreRefusedByName) {
  const auto refuses = [](const StepOptions& options, const std::string& text) {
    try {
      build_step_schedule(three_units(1, 2), {}, kForward, {}, kBackward, options);
    } catch (const core::InvalidArgument& error) {
      return std::string(error.what()).find(text) != std::string::npos;
    }
    return false;
  };
  EXPECT_TRUE(refuses({.lookahead = -1}, "lookahead: expected 0 to 1048576 units, got -1"));
  const std::string expected = "expected 2 to 1048576 units, or none for lookahead + 2, got ";
  EXPECT_TRUE(refuses({.max_units_in_flight = 1}, expected + "1"));
  EXPECT_TRUE(refuses({.max_units_in_flight = -3}, expected + "-3"));
  EXPECT_EQ((StepOptions{.lookahead = 3}).units_in_flight(), 5);
  EXPECT_EQ((StepOptions{.lookahead = 3, .max_units_in_flight = 2}).units_in_flight(), 2);
}

TEST(StepSchedule, RefusesUnitsThatTheLayoutLacks) {
  for (const int unit : {-1, 3}) {
    const Trace unknown{before_use(unit)};
    EXPECT_THROW(build_step_schedule(three_units(1, 2), {}, unknown, {}, kBackward, {}),
                 core::InvalidArgument);
    EXPECT_THROW(build_step_schedule(three_units(1, 2), {}, kForward, {}, unknown, {}),
                 core::InvalidArgument);
    EXPECT_THROW(build_step_schedule(three_units(1, 2), {}, kForward, unknown, kBackward, {}),
                 core::InvalidArgument);
  }
}

TEST(StepSchedule, HashLeavesOutARanksOwnBatchesAndNothingElse) {
  const auto hash = [](const Trace& forward, const StepOptions& options, const Batches& batches) {
    return build_step_schedule(three_units(2, 2), batches, forward, {}, kBackward, options).hash();
  };
  const std::uint64_t expected = hash(kForward, {}, batches_of({{0}, {1, 2}}));
  EXPECT_EQ(hash(kForward, {}, {}), expected);
  EXPECT_NE(hash(kForward, {.lookahead = 1}, {}), expected);
  EXPECT_NE(hash(kForward, {.node_copy = false}, {}), expected);
  EXPECT_NE(hash({before_use(0), before_use(1), before_use(2)}, {}, {}), expected);
}

}  // namespace
}  // namespace dmuon::schedule
