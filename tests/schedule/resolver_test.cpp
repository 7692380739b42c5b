#include "dmuon/schedule/resolver.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/schedule/recorder.h"

namespace dmuon::schedule {
namespace {

TEST_F(ResolverTest, ComparesATriggerOfATracedPassBeforeItIssuesIt) {
  Resolver resolver = make(1);
  forward(&resolver, {kB});
  EXPECT_EQ(recorder_.take(),
            "compare before use of 1, publish intra 1, await weights 1, "
            "compare after forward of 1, reshard 1");
  resolver.end_pass();
  EXPECT_EQ(recorder_.take(), "compare the end");
}

TEST_F(ResolverTest, IssuesNothingOfATriggerWhoseComparisonFailed) {
  Resolver resolver = make(2);
  resolver.begin_forward(true);
  recorder_.throws_on_compare = true;
  EXPECT_THROW(resolver.before_use(kA), std::runtime_error);
  EXPECT_EQ(recorder_.take(), "");
  EXPECT_FALSE(resolver.ready(kA));
}

TEST_F(ResolverTest, LeavesOutWhatHasBeenIssued) {
  Resolver resolver = make(2);
  trace(&resolver);
  resolver.serve({Moment::kBeforeUse, kA});  // the step sent both stages
  EXPECT_EQ(recorder_.take(), "await weights 0");
  resolver.serve({Moment::kBeforeUse, kA});
  EXPECT_EQ(recorder_.take(), "");
  resolver.serve({Moment::kAfterForward, kA});
  EXPECT_EQ(recorder_.take(), "reshard 0");
  resolver.serve({Moment::kAfterForward, kA});
  EXPECT_EQ(recorder_.take(), "");
  resolver.serve({Moment::kBeforeUse, kA});
  EXPECT_EQ(recorder_.take(), "publish intra 0, await weights 0");
}

TEST_F(ResolverTest, SendsBothStagesAgainWithoutNodeCopies) {
  Resolver resolver = make(2, {.node_copy = false});
  for (int i = 0; i < 2; ++i) {
    resolver.serve({Moment::kBeforeUse, kA});
    resolver.serve({Moment::kAfterForward, kA});
    EXPECT_EQ(recorder_.take(), "publish inter 0, publish intra 0, await weights 0, reshard 0");
  }
}

// The backward's schedule takes the stage 1 of the forward's units for done.
TEST_F(ResolverTest, SendsStage1WhereStage2LacksIt) {
  Resolver resolver = make(2, {.lookahead = 0});
  trace(&resolver);
  resolver.begin_backward();
  resolver.before_backward(kC);
  EXPECT_EQ(recorder_.take(), "publish inter 2, publish intra 2, await weights 2");
}

// The update changes what stage 1 reads.
TEST_F(ResolverTest, WaitsForAStage1ThatNobodyUsedBeforeTheNextUpdate) {
  Resolver resolver = make(2, {.lookahead = 2});
  trace(&resolver);
  resolver.step();
  EXPECT_EQ(
      recorder_.take(),
      "reshard 0, reshard 1, reshard 2, " + update(0) + ", " + update(1) + ", " + update(2) +
          ", finish update 0, publish inter 0, publish intra 0, finish update 1, publish inter 1, "
          "finish update 2, publish inter 2");
}

// What a late update reads and writes is free before anything else reads or writes it.
TEST_F(ResolverTest, FinishesALateUpdateInABackwardOrAStepAndInNoForward) {
  const std::string finish = "finish update 0, finish update 1, finish update 2";
  const auto begin = [&] {
    recorder_.take();
    Resolver resolver = make(1, {.late_updates = true});
    trace(&resolver);
    for (const bool training : {false, true}) {
      resolver.begin_forward(training);
      resolver.before_use(kA);
      resolver.end_forward();
      EXPECT_EQ(recorder_.take().find("finish update"), std::string::npos);
    }
    return resolver;
  };
  const auto finishes_in = [&](auto call) {
    Resolver resolver = begin();
    call(resolver);
    EXPECT_NE(recorder_.take().find(finish), std::string::npos);
    resolver.finish_update();
    EXPECT_EQ(recorder_.take(), "");  // once
  };
  finishes_in([](Resolver& resolver) { resolver.finish_update(); });
  finishes_in([](Resolver& resolver) { resolver.begin_backward(); });
  finishes_in([](Resolver& resolver) { resolver.settle_step(); });
  finishes_in([](Resolver& resolver) { resolver.publish(); });

  Resolver resolver = begin();
  resolver.step();
  const std::string issued = recorder_.take();
  EXPECT_LT(issued.find(finish), issued.find(update(0)));
  resolver.finish_update();
  EXPECT_EQ(recorder_.take(), finish);  // of the second step
}

// Whether the passes after it agree must not depend on what the first one kept.
TEST_F(ResolverTest, TracesTheSameInABackwardThatKeepsWeights) {
  const auto traced = [&](bool keeps) {
    Resolver resolver = make(1, {.reshard_after_forward = false});
    forward(&resolver, {kA, kB, kA});
    resolver.begin_backward(keeps);
    for (const UnitIndex unit : {kA, kB, kA}) {
      resolver.before_backward(unit);
      resolver.before_gradient(unit);
      resolver.after_backward(unit);
    }
    resolver.end_backward();
    return resolver.order().trace(Pass::kBackward);
  };
  EXPECT_EQ(traced(true), traced(false));
  EXPECT_EQ(traced(true).size(), 6);
}

// Passes send and free nothing, whatever they use; a new version replaces all.
TEST_F(ResolverTest, SendsReplicatedWeightsOnceAVersion) {
  Resolver resolver =
      make(2, {.node_copy = false, .reshard_after_forward = false, .replicated = true});
  trace(&resolver);
  resolver.step();
  EXPECT_NE(recorder_.take().find("publish inter 2, publish intra 2"), std::string::npos);
  for (int micro_step = 0; micro_step < 2; ++micro_step) {
    forward(&resolver, {kA, kB, kC});
    backward(&resolver, {kC, kB, kA});
  }
  resolver.settle_step();
  const std::string issued = recorder_.take();
  EXPECT_EQ(issued.find("publish"), std::string::npos) << issued;
  EXPECT_EQ(issued.find("reshard"), std::string::npos) << issued;
  resolver.publish();
  EXPECT_EQ(recorder_.take(),
            "reshard 0, reshard 1, reshard 2, publish inter 0, publish intra 0, publish inter 1, "
            "publish intra 1, publish inter 2, publish intra 2");
  resolver.free_weights();
  EXPECT_EQ(recorder_.take(), "reshard 0, reshard 1, reshard 2");
  resolver.serve({Moment::kBeforeUse, kA});
  EXPECT_EQ(recorder_.take(), "publish inter 0, publish intra 0, await weights 0");
}

// Another backward may read them.
TEST_F(ResolverTest, FreesNoWeightsInABackwardThatKeepsThem) {
  Resolver resolver = make(1, {.reshard_after_forward = false});
  forward(&resolver, {kA, kB});
  recorder_.take();
  for (const bool keeps : {true, false}) {
    resolver.begin_backward(keeps);
    resolver.before_backward(kB);
    resolver.before_gradient(kB);
    resolver.after_backward(kB);
    resolver.end_backward();
    EXPECT_EQ(recorder_.take().find("reshard") == std::string::npos, keeps);
    EXPECT_EQ(resolver.ready(kA), keeps);
    EXPECT_EQ(resolver.ready(kB), keeps);
  }
  resolver.begin_backward(true);
  resolver.before_backward(kB);
  resolver.end_backward();
  resolver.step();  // weights are new
  EXPECT_FALSE(resolver.ready(kB));
}

TEST_F(ResolverTest, FinishesAUnitsRouteBeforeItIsRoutedAgain) {
  Resolver resolver = make(2);
  trace(&resolver);
  backward(&resolver, {kC, kB, kA});
  recorder_.take();
  resolver.serve({Moment::kAfterBackward, kA});
  EXPECT_EQ(recorder_.take(),
            "finish route intra 0, finish route inter 0, route intra 0, route inter 0, "
            "finish route intra 0, finish route inter 0");
  resolver.finish_routes();
  EXPECT_EQ(recorder_.take(), "finish route inter 2, finish route inter 1");
}

// New gradients come where those in flight lie; between nodes goes a copy.
TEST_F(ResolverTest, FinishesStage1OfAUnitsRouteBeforeItGetsGradientsAgain) {
  for (const auto& [num_replicates, with_use] :
       {std::pair{1, false}, {1, true}, {2, false}, {2, true}}) {
    Resolver resolver = make(num_replicates);
    trace(&resolver);
    resolver.begin_backward();
    resolver.before_backward(kC);
    resolver.before_gradient(kC);
    resolver.after_backward(kC);
    recorder_.take();
    if (with_use) {
      resolver.before_backward(kC);
      EXPECT_EQ(recorder_.take(),
                "compare before use of 2, publish intra 2, await weights 2, finish route intra 2");
    } else {
      resolver.before_gradient(kC);
      EXPECT_EQ(recorder_.take(), "finish route intra 2");
    }
  }
}

TEST_F(ResolverTest, WaitsForTheLastStageOfTheRouteThatIsInFlight) {
  for (const bool sync : {true, false}) {
    Resolver resolver = make(2);
    trace(&resolver);
    resolver.set_sync(sync);
    backward(&resolver, {kC, kB, kA});
    resolver.set_sync(!sync);
    resolver.finish_routes();
    const Kind last = sync ? Kind::kRouteInter : Kind::kRouteIntra;
    EXPECT_EQ(recorder_.after, (std::vector<Dependency>{{last, kA}}));
    EXPECT_EQ(resolver.holds_partial_sums(), !sync);
  }
}

TEST_F(ResolverTest, SendsPartialSumsOnBeforeAStep) {
  Resolver resolver = make(2);
  trace(&resolver);
  resolver.set_sync(false);
  forward(&resolver, {kA, kB, kC});
  backward(&resolver, {kC, kB, kA});
  resolver.settle();
  recorder_.take();
  resolver.settle_step();
  EXPECT_EQ(recorder_.take(),
            "route intra 0, route inter 0, finish route intra 0, finish route inter 0, "
            "route intra 1, route inter 1, finish route intra 1, finish route inter 1, "
            "route intra 2, route inter 2, finish route intra 2, finish route inter 2");
  EXPECT_FALSE(resolver.holds_partial_sums());
}

TEST_F(ResolverTest, RunsABackwardThatIsOwedBeforeAStep) {
  Resolver resolver = make(1);
  trace(&resolver);
  EXPECT_FALSE(resolver.owes_backward());
  forward(&resolver, {kA, kB, kC});
  EXPECT_TRUE(resolver.owes_backward());
  recorder_.take();
  resolver.settle_step();
  EXPECT_EQ(recorder_.take(),
            "publish intra 1, reshard 2, route intra 2, publish intra 0, await weights 1, "
            "reshard 1, route intra 1, await weights 0, reshard 0, finish route intra 2, "
            "route intra 0, finish route intra 1, finish route intra 0");
  EXPECT_FALSE(resolver.owes_backward());
}

// Else a rank that skips the unit would not deviate with the others once it is not ready.
TEST_F(ResolverTest, TracesUsesOfUnitsThatAreReadyAlready) {
  Resolver resolver = make(1, {.reshard_after_forward = false});
  forward(&resolver, {kA, kB, kC});
  backward(&resolver, {kC, kB, kA});
  resolver.settle();
  const Trace expected{before_use(2),     after_backward(2), before_use(1),
                       after_backward(1), before_use(0),     after_backward(0)};
  EXPECT_EQ(resolver.order().trace(Pass::kBackward), expected);
}

// The last unit stays for a backward that does not come to it.
TEST_F(ResolverTest, ReleasesWhatIsStillOpenAfterEverythingElse) {
  Resolver resolver = make(1, {.lookahead = 0});
  forward(&resolver, {kA, kB, kC});
  backward(&resolver, {kB, kA});
  forward(&resolver, {kA, kB, kC});
  EXPECT_TRUE(resolver.ready(kC));
  recorder_.take();
  backward(&resolver, {});  // skips
  EXPECT_EQ(recorder_.take(),
            "publish intra 1, await weights 1, reshard 1, route intra 1, finish route intra 1, "
            "publish intra 0, await weights 0, reshard 0, route intra 0, finish route intra 0, "
            "compare after backward of 2, reshard 2, route intra 2, finish route intra 2, "
            "compare the end");
}

// By what was crossed: a rank that got no gradient of the unit must route it as the others do.
TEST_F(ResolverTest, RoutesAtTheEndWhatADeviationLeftUnrouted) {
  Resolver resolver = make(1, {.lookahead = 0});
  backward(&resolver, {kA, kB, kA});
  resolver.begin_backward();
  resolver.before_backward(kA);
  resolver.after_backward(kA);  // not its last in the trace
  resolver.before_backward(kC);
  resolver.after_backward(kC);
  recorder_.take();
  resolver.end_backward();
  EXPECT_EQ(recorder_.take(),
            "compare after backward of 0, route intra 0, finish route intra 0, compare the end");
}

TEST_F(ResolverTest, ReleasesAUnitWhoseGradientCameWithoutAUse) {
  Resolver resolver = make(1);
  resolver.begin_backward();
  resolver.before_gradient(kB);
  resolver.end_backward();
  EXPECT_EQ(recorder_.take(),
            "compare after backward of 1, route intra 1, finish route intra 1, compare the end");
}

TEST_F(ResolverTest, TakesAnOperationThatThrewForNotDone) {
  Resolver resolver = make(2);
  recorder_.throws_on = Kind::kPublishIntra;
  EXPECT_THROW(resolver.serve({Moment::kBeforeUse, kA}), std::runtime_error);
  recorder_.throws_on.reset();
  resolver.serve({Moment::kBeforeUse, kA});
  EXPECT_EQ(recorder_.take(), "publish inter 0, publish intra 0, await weights 0");
  recorder_.throws_on = Kind::kReshard;
  EXPECT_THROW(resolver.serve({Moment::kAfterForward, kA}), std::runtime_error);
  EXPECT_FALSE(resolver.ready(kA));  // nobody computes with half of it
}

TEST_F(ResolverTest, HashTellsWhatWasCrossedAndHowItSyncs) {
  const auto hash_of = [&](const std::vector<UnitIndex>& units, bool sync) {
    Resolver resolver = make(2);
    trace(&resolver);
    resolver.set_sync(sync);
    forward(&resolver, units);
    backward(&resolver, {});
    return resolver.hash();
  };
  EXPECT_EQ(hash_of({kA, kB, kC}, true), hash_of({kB}, true));  // it skips, and crosses the same
  EXPECT_NE(hash_of({kA, kB, kC}, true), hash_of({kA, kB, kC}, false));
  EXPECT_NE(hash_of({kA, kB, kC}, true), hash_of({kA, kB, kA}, true));
}

}  // namespace
}  // namespace dmuon::schedule
