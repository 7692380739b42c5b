// Units whose weights several modules read: no hook says which read is a use's last one.

#include <gtest/gtest.h>

#include "tests/schedule/recorder.h"

namespace dmuon::schedule {
namespace {

using Triggers = std::vector<Trigger>;

void read(Resolver* resolver, UnitIndex unit) {
  resolver->before_use(unit, /*reader=*/true);
  resolver->after_read({Moment::kAfterForward, unit});
}

void read_in_backward(Resolver* resolver, UnitIndex unit) {
  resolver->before_backward(unit, /*reader=*/true);
  resolver->before_gradient(unit);
  resolver->after_read({Moment::kAfterBackward, unit});
}

class ReadsTest : public ResolverTest {
 protected:
  // A and B are read in turns, then C; the backward likewise.
  static void towers(Resolver* resolver) {
    resolver->begin_forward(/*training=*/true, /*whole=*/true);
    for (const UnitIndex unit : {kA, kB, kA, kB, kC}) read(resolver, unit);
    resolver->end_forward();
    resolver->begin_backward();
    for (const UnitIndex unit : {kC, kB, kA, kB, kA}) read_in_backward(resolver, unit);
    resolver->end_backward();
  }

  void trace_towers(Resolver* resolver) {
    towers(resolver);
    resolver->settle_step();
    resolver->step();
    recorder_.take();
  }
};

TEST_F(ReadsTest, ATracedForwardKeepsTheWeightsUntilItsEnd) {
  Resolver resolver = make(1);
  resolver.begin_forward(true, true);
  read(&resolver, kA);
  read(&resolver, kB);
  read(&resolver, kA);
  EXPECT_EQ(recorder_.take(),
            "compare before use of 0, publish intra 0, await weights 0, "
            "compare before use of 1, publish intra 1, await weights 1, compare before use of 0");
  resolver.end_forward();
  EXPECT_EQ(recorder_.take(),
            "compare after forward of 1, reshard 1, compare after forward of 0, reshard 0");
}

TEST_F(ReadsTest, ATracedForwardEndsTheOldestUseIfTooManyUnitsAreRead) {
  Layout layout = three_units(1, 2);
  while (layout.units.size() <= kMostRead) layout.units.push_back(layout.units.front());
  Resolver resolver(layout, {}, {}, &recorder_);
  resolver.begin_forward(true, true);
  for (int unit = 0; unit < kMostRead; ++unit) read(&resolver, UnitIndex(unit));
  recorder_.take();
  read(&resolver, UnitIndex(kMostRead));
  EXPECT_EQ(recorder_.take(),
            "compare after forward of 0, reshard 0, "
            "compare before use of 4, publish intra 4, await weights 4");
  read(&resolver, kA);  // comes again
  EXPECT_EQ(recorder_.take(),
            "compare after forward of 1, reshard 1, "
            "compare before use of 0, publish intra 0, await weights 0");
}

TEST_F(ReadsTest, TheTraceEndsAUseAfterItsLastRead) {
  Resolver resolver = make(1);
  trace_towers(&resolver);
  // The backward begins with C, and B and A come right after it, so none is freed at the end.
  const Trace forward{before_use(0), before_use(1),    before_use(0), after_forward(0),
                      before_use(1), after_forward(1), before_use(2)};
  const Trace backward{before_use(2), after_backward(2), before_use(1), before_use(0),
                       before_use(1), after_backward(1), before_use(0), after_backward(0)};
  EXPECT_EQ(resolver.order().trace(Pass::kTrainForward), forward);
  EXPECT_EQ(resolver.order().trace(Pass::kBackward), backward);
}

TEST_F(ReadsTest, AReplayFreesAUnitBeforeTheNextUse) {
  Resolver resolver = make(1, {.lookahead = 0});
  trace_towers(&resolver);
  resolver.begin_forward(true, true);
  for (const UnitIndex unit : {kA, kB, kA, kB}) read(&resolver, unit);
  recorder_.take();
  read(&resolver, kC);
  EXPECT_EQ(recorder_.take(), "reshard 1, publish intra 2, await weights 2");
}

TEST_F(ReadsTest, AReplayRoutesOnceAUse) {
  Resolver resolver = make(1);
  trace_towers(&resolver);
  towers(&resolver);
  const std::string all = recorder_.take();
  for (const char* route : {", route intra 0", ", route intra 1", ", route intra 2"}) {
    EXPECT_NE(all.find(route), std::string::npos) << route;
    EXPECT_EQ(all.find(route), all.rfind(route)) << route;
  }
  EXPECT_EQ(all.find("compare"), std::string::npos);
}

// As where a module reads a unit's weights, and another inside of it begins the next use.
TEST_F(ReadsTest, AReplayDeviatesWhereItsTraceWouldFreeAUnitThatIsBeingRead) {
  Resolver resolver = make(1, {.lookahead = 0});
  trace_towers(&resolver);
  resolver.begin_forward(true, true);
  read(&resolver, kA);
  resolver.before_use(kB, /*reader=*/true);
  resolver.set_in_use(kB, true);
  recorder_.take();
  read(&resolver, kA);
  EXPECT_EQ(recorder_.take(), "");
  resolver.before_use(kC);
  // First what the trace owes before that place, which all ranks issue.
  EXPECT_EQ(recorder_.take(),
            "reshard 0, compare before use of 2, publish intra 2, await weights 2");
  EXPECT_TRUE(resolver.ready(kB));
}

// As where a program calls submodules by themselves, and one of them calls another inside.
TEST_F(ReadsTest, AForwardThatStartsByItselfFreesNoUnitInAnOpenCall) {
  Resolver resolver = make(1, {.lookahead = 0});
  trace(&resolver);
  resolver.begin_forward(true);
  resolver.before_use(kA);
  resolver.after_forward(kA);
  resolver.before_use(kB);
  resolver.set_in_use(kB, true);
  recorder_.take();
  resolver.before_use(kA);
  EXPECT_EQ(recorder_.take(), "compare before use of 0, publish intra 0, await weights 0");
  EXPECT_TRUE(resolver.ready(kB));
}

TEST_F(ReadsTest, AnEvaluationBySubmodulesIsMoreThanOneForward) {
  Resolver resolver = make(1, {.lookahead = 0});
  const auto evaluate = [&](int num_batches, const std::vector<UnitIndex>& units) {
    resolver.begin_forward(/*training=*/false);
    for (int batch = 0; batch < num_batches; ++batch) {
      for (const UnitIndex unit : units) {
        resolver.before_use(unit);
        resolver.after_forward(unit);
      }
    }
    recorder_.take();
  };
  evaluate(100, {kA, kA, kA, kB});
  EXPECT_FALSE(resolver.order().on_demand());
  evaluate(1, {kA, kA, kA, kB});
  EXPECT_TRUE(resolver.may_begin_training());
  resolver.begin_forward(/*training=*/true);
  EXPECT_EQ(recorder_.take(), "");
}

// As where a checkpoint inside a module recomputes, and reads another unit's weights.
TEST_F(ReadsTest, AReplayDeviatesWhereItsTraceWouldFreeAUnitWhoseBackwardIsOpen) {
  Resolver resolver = make(1, {.lookahead = 0});
  trace(&resolver);
  forward(&resolver, {kA, kB, kC});
  resolver.begin_backward();
  resolver.before_backward(kC);
  resolver.set_in_use(kC, true);
  recorder_.take();
  resolver.before_use(kA, /*reader=*/true);
  EXPECT_EQ(recorder_.take(), "compare before use of 0, publish intra 0, await weights 0");
  EXPECT_TRUE(resolver.ready(kC));
}

TEST_F(ReadsTest, ARankThatLeavesAReadOutStillIssuesWhatTheOthersDo) {
  const auto issued_with = [&](const std::vector<UnitIndex>& units) {
    Resolver resolver = make(1, {.lookahead = 0});
    trace_towers(&resolver);
    resolver.begin_forward(true, true);
    for (const UnitIndex unit : units) read(&resolver, unit);
    return recorder_.take();
  };
  const std::string all = issued_with({kA, kB, kA, kB, kC});
  EXPECT_EQ(issued_with({kA, kC}), all);
  EXPECT_EQ(issued_with({kB, kC}), all);
  EXPECT_NE(all.find("reshard 0"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::schedule
