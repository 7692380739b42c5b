// Units without elements, as those in which all parameters are the host framework's.

#include <gtest/gtest.h>

#include <utility>

#include "tests/schedule/recorder.h"

namespace dmuon::schedule {
namespace {

constexpr int kEmpty = 3;

Layout with_an_empty_unit(Layout layout) {
  const core::Vector<core::Slot, std::int64_t> nothing(layout.num_slots(), 0);
  layout.units.push_back({"empty", nothing, 4, 4, /*host=*/true});
  return layout;
}

// With a use of the empty unit around or before each use, and one more at the end.
Trace with_empty_uses(const Trace& trace, Trigger released, bool around) {
  Trace more;
  for (const Trigger& trigger : trace) {
    const bool begins = trigger.moment == Moment::kBeforeUse;
    if (begins) more.push_back(before_use(kEmpty));
    if (begins && !around) more.push_back(released);
    more.push_back(trigger);
    if (!begins && around) more.push_back(released);
  }
  more.push_back(before_use(kEmpty));
  more.push_back(released);
  return more;
}

// That of a pass without its empty unit, of whose triggers none may have an operation, but for what
// a pass begins with.
PassSchedule without_empty(const PassSchedule& schedule, const Trace& trace) {
  PassSchedule left;
  std::vector<Operation> first;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const std::vector<Operation>& operations = schedule.at(i);
    if (trace[i].unit != core::UnitIndex(kEmpty)) {
      left.push_back(std::exchange(first, {}));
      left.back().insert(left.back().end(), operations.begin(), operations.end());
    } else if (i == 0) {
      first = operations;
    } else {
      EXPECT_EQ(text_of(operations), "") << "place " << i;
    }
  }
  return left;
}

std::vector<std::string> text_of(const PassSchedule& schedule) {
  std::vector<std::string> texts;
  for (const std::vector<Operation>& operations : schedule) texts.push_back(text_of(operations));
  return texts;
}

class EmptyUnits : public testing::TestWithParam<bool> {
 protected:
  void check(const Layout& layout, const StepOptions& options) const {
    const Layout more = with_an_empty_unit(layout);
    const Trace forward = with_empty_uses(kForward, after_forward(kEmpty), GetParam());
    const Trace backward = with_empty_uses(kBackward, after_backward(kEmpty), GetParam());
    const Batches batches = batches_of({{0}, {1}, {2}});
    const StepSchedule with =
        build_step_schedule(more, batches, forward, forward, backward, options);
    const StepSchedule expected =
        build_step_schedule(layout, batches, kForward, kForward, kBackward, options);
    same(without_empty(with.forward, forward), expected.forward);
    same(without_empty(with.evaluation, forward), expected.evaluation);
    same(without_empty(with.backward, backward), expected.backward);
    same(without_empty(with.backward_no_sync, backward), expected.backward_no_sync);
    same({with.step}, {expected.step});
  }

  static void same(const PassSchedule& got, const PassSchedule& expected) {
    EXPECT_EQ(text_of(got), text_of(expected));
    EXPECT_TRUE(got == expected);  // what each waits for, too
  }
};

// No operation is of an empty unit, and none goes less far ahead because of one.
TEST_P(EmptyUnits, ChangeNoOperationOfOthers) {
  for (const int num_replicates : {1, 2}) {
    for (const int lookahead : {0, 1, 2, 5}) {
      for (const bool node_copy : {false, true}) {
        check(three_units(num_replicates, 2), {.node_copy = node_copy, .lookahead = lookahead});
        if (testing::Test::HasFailure()) FAIL() << "lookahead " << lookahead << ", " << node_copy;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(BetweenUsesAndAroundThem, EmptyUnits, testing::Bool());

TEST(EmptyUnit, IsServedNothing) {
  const Layout layout = with_an_empty_unit(three_units(2, 2));
  for (const Trigger& trigger : {before_use(kEmpty), after_forward(kEmpty), after_backward(kEmpty)})
    EXPECT_TRUE(serve_on_demand(layout, Maker(layout, {}), trigger, true).empty()) << trigger;
}

/// With three units and an empty one of the host's.
class EmptyInResolver : public ResolverTest {
 protected:
  Resolver make_with_empty() {
    return Resolver(with_an_empty_unit(three_units(1, 2)), {.lookahead = 0},
                    batches_of({{0}, {1}, {2}}), &recorder_);
  }
  const UnitIndex empty_{kEmpty};
};

// Nothing is sent, yet ranks that leave it out are found.
TEST_F(EmptyInResolver, IsTracedAndLeftToTheHost) {
  Resolver resolver = make_with_empty();
  forward(&resolver, {kA, empty_});
  EXPECT_EQ(recorder_.take(),
            "leave before a forward, compare before use of 0, publish intra 0, await weights 0, "
            "compare after forward of 0, reshard 0, "
            "compare before use of 3, leave before use of 3");
  resolver.begin_backward();
  resolver.before_backward(empty_);
  resolver.after_backward(empty_);
  resolver.before_backward(kA);
  resolver.after_backward(kA);
  resolver.end_backward();
  EXPECT_EQ(recorder_.take(),
            "compare the end, compare before use of 3, leave before use of 3, "
            "compare after backward of 3, leave after backward of 3, "
            "compare before use of 0, publish intra 0, await weights 0, "
            "compare after backward of 0, reshard 0, route intra 0, finish route intra 0, "
            "compare the end, leave at the end");
}

// As a unit of which two outputs have gradients, or one that is recomputed: once is enough.
TEST_F(EmptyInResolver, IsUsedOnceByABackwardThatComesToItTwice) {
  Resolver resolver = make_with_empty();
  for (int step = 0; step < 2; ++step) {
    resolver.begin_backward();
    resolver.before_backward(empty_);
    if (step == 1) resolver.before_backward(empty_);
    resolver.after_backward(empty_);
    resolver.end_backward();
    if (step == 0) recorder_.take();
  }
  EXPECT_EQ(recorder_.take(), "leave before use of 3, leave after backward of 3, leave at the end");
}

// As a module that is shared: the host has collectives for each.
TEST_F(EmptyInResolver, IsUsedAgainAfterItsRelease) {
  Resolver resolver = make_with_empty();
  backward(&resolver, {});
  recorder_.take();
  resolver.begin_backward();
  const std::string use =
      "compare before use of 3, leave before use of 3, "
      "compare after backward of 3, leave after backward of 3";
  for (int i = 0; i < 2; ++i) {
    resolver.before_backward(empty_);
    resolver.after_backward(empty_);
    EXPECT_EQ(recorder_.take(), use);
  }
}

}  // namespace
}  // namespace dmuon::schedule
