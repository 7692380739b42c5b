#include "dmuon/schedule/order.h"

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "tests/schedule/triggers.h"

namespace dmuon::schedule {
namespace {

using Triggers = std::vector<Trigger>;

// Units 0, 1 and 2 in order, each freed after its use.
const Triggers kForward{before_use(0),    after_forward(0), before_use(1),
                        after_forward(1), before_use(2),    after_forward(2)};
// What a replay issues of it: the backward begins with unit 2, so it stays.
const Triggers kReplay{before_use(0), after_forward(0), before_use(1), after_forward(1),
                       before_use(2)};
const Triggers kBackward{before_use(2),     after_backward(2), before_use(1),
                         after_backward(1), before_use(0),     after_backward(0)};

std::vector<Crossing> request_all(Order* order, const Triggers& triggers) {
  std::vector<Crossing> issues;
  for (const Trigger& trigger : triggers) append(&issues, order->request(trigger));
  return issues;
}

// An order that has traced one pass of each kind and has none open.
Order traced() {
  Order order;
  order.begin_forward(/*training=*/true);
  request_all(&order, kForward);
  order.end_pass();
  order.begin_backward();
  request_all(&order, kBackward);
  order.end_pass();
  return order;
}

bool all_compare(const std::vector<Crossing>& issues) {
  for (const Crossing& issue : issues) {
    if (!issue.is_compared()) return false;
  }
  return true;
}

bool none_compares(const std::vector<Crossing>& issues) {
  for (const Crossing& issue : issues) {
    if (issue.is_compared()) return false;
  }
  return true;
}

TEST(Order, ComparesEachRequestOfATracedPassAndIssuesNothingElse) {
  Order order;
  order.begin_forward(true);
  EXPECT_TRUE(order.on_demand());
  for (const Trigger& trigger : kForward) {
    const std::vector<Crossing> issues = order.request(trigger);
    EXPECT_EQ(triggers_of(issues), Triggers{trigger});
    EXPECT_TRUE(all_compare(issues));
    EXPECT_FALSE(order.owes(trigger));
  }
  EXPECT_TRUE(order.end_pass().empty());
  EXPECT_FALSE(order.current().has_value());
}

TEST(Order, ReplaysAPassWithoutComparison) {
  Order order = traced();
  order.begin_forward(true);
  EXPECT_FALSE(order.on_demand());
  const std::vector<Crossing> issues = request_all(&order, kReplay);
  EXPECT_EQ(triggers_of(issues), kReplay);
  EXPECT_TRUE(none_compares(issues));
  EXPECT_FALSE(order.owes(after_forward(2)));
  EXPECT_TRUE(order.end_pass().empty());
}

TEST(Order, IssuesWhatWasSkippedBeforeTheRequest) {
  Order order = traced();
  order.begin_forward(true);
  EXPECT_EQ(triggers_of(order.request(before_use(0))), Triggers{before_use(0)});
  EXPECT_TRUE(order.owes(after_forward(1)));
  const Triggers expected{after_forward(0), before_use(1), after_forward(1), before_use(2)};
  EXPECT_EQ(triggers_of(order.request(before_use(2))), expected);
  EXPECT_FALSE(order.owes(after_forward(1)));
}

TEST(Order, IssuesTheRestAtTheEndOfAPass) {
  Order order = traced();
  order.begin_forward(true);
  order.request(before_use(1));
  const std::vector<Crossing> rest = order.end_pass();
  EXPECT_EQ(triggers_of(rest), (Triggers{after_forward(1), before_use(2)}));
  EXPECT_TRUE(none_compares(rest));
}

TEST(Order, IssuesAWholePassForARankThatUsedNothing) {
  Order order = traced();
  order.begin_backward();
  EXPECT_EQ(triggers_of(order.end_pass()), kBackward);
}

TEST(Order, StartsTheNextForwardAtARequestThatLiesBehind) {
  Order order = traced();
  order.begin_forward(true);
  request_all(&order, {before_use(0), after_forward(0), before_use(1)});
  // The model is driven through its submodules: no begin_forward.
  const std::vector<Crossing> issues = order.request(before_use(0));
  const Triggers expected{after_forward(1), before_use(2), before_use(0)};
  EXPECT_EQ(triggers_of(issues), expected);
  EXPECT_TRUE(none_compares(issues));
  EXPECT_EQ(order.current(), Pass::kTrainForward);
  EXPECT_TRUE(order.owes(before_use(1)));
}

TEST(Order, SaysWhatTheNextForwardOwesBeforeARequestThatLiesBehind) {
  Order order = traced();
  order.begin_forward(true, /*has_end=*/true);
  request_all(&order, {before_use(0), after_forward(0), before_use(1)});
  EXPECT_TRUE(order.owed_before(after_forward(0)).empty());
  order.end_forward();
  const Triggers expected{after_forward(1), before_use(2), before_use(0)};
  EXPECT_EQ(order.owed_before(after_forward(0)), expected);
  // If that would free what is in use, the open forward goes on without its trace.
  const Triggers rest{after_forward(1), before_use(2)};
  EXPECT_EQ(triggers_of(order.deviate_before(before_use(0))), rest);
  EXPECT_EQ(triggers_of(order.request(after_forward(0))), Triggers{after_forward(0)});
  EXPECT_TRUE(order.on_demand());
}

TEST(Order, ServesADeviationOnDemandAndTracesTheNextPassAgain) {
  Order order = traced();
  order.begin_forward(true);
  order.request(before_use(0));
  const std::vector<Crossing> stranger = order.request(before_use(7));
  EXPECT_EQ(triggers_of(stranger), Triggers{before_use(7)});
  EXPECT_TRUE(all_compare(stranger));
  EXPECT_TRUE(order.on_demand());
  // The trace no longer holds: what it has ahead is neither issued early nor owed.
  const std::vector<Crossing> known = order.request(before_use(2));
  EXPECT_EQ(triggers_of(known), Triggers{before_use(2)});
  EXPECT_TRUE(all_compare(known));
  EXPECT_TRUE(order.end_pass().empty());

  const Triggers changed{before_use(2), before_use(0)};
  order.begin_forward(true);
  EXPECT_TRUE(order.on_demand());
  EXPECT_TRUE(all_compare(request_all(&order, changed)));
  EXPECT_TRUE(order.end_pass().empty());

  order.begin_forward(true);
  EXPECT_FALSE(order.on_demand());
  EXPECT_EQ(triggers_of(order.end_pass()), changed);
}

TEST(Order, KeepsOtherTracesWhenOnePassDeviates) {
  Order order = traced();
  order.begin_forward(true);
  order.request(before_use(7));
  order.end_pass();
  order.begin_backward();
  EXPECT_FALSE(order.on_demand());
  EXPECT_EQ(triggers_of(order.end_pass()), kBackward);
}

TEST(Order, TakesABackwardRequestThatLiesBehindForADeviation) {
  Order order = traced();
  order.begin_backward();
  request_all(&order, {before_use(2), after_backward(2)});
  const std::vector<Crossing> issues = order.request(before_use(2));
  EXPECT_EQ(triggers_of(issues), Triggers{before_use(2)});
  EXPECT_TRUE(all_compare(issues));
  EXPECT_TRUE(order.on_demand());
}

TEST(Order, TracesTrainingAndEvaluationForwardsSeparately) {
  Order order = traced();
  order.begin_forward(/*training=*/false);
  EXPECT_EQ(order.current(), Pass::kEvalForward);
  EXPECT_TRUE(order.on_demand());
  EXPECT_TRUE(all_compare(request_all(&order, {before_use(1), after_forward(1)})));
  order.end_pass();
  order.begin_forward(/*training=*/true);
  EXPECT_EQ(triggers_of(order.end_pass()), kReplay);
  // No backward follows an evaluation: its last unit is freed.
  order.begin_forward(/*training=*/false);
  EXPECT_EQ(triggers_of(order.end_pass()), (Triggers{before_use(1), after_forward(1)}));
}

TEST(Order, OwesOfAForwardWhatItsTraceHasLeft) {
  Order order = traced();
  EXPECT_FALSE(order.owes_forward());
  order.begin_forward(true);
  EXPECT_TRUE(order.owes_forward());
  order.request(before_use(2));
  EXPECT_FALSE(order.owes_forward());
  order.end_pass();
  order.begin_backward();
  EXPECT_FALSE(order.owes_forward());
  order.end_pass();
  order.begin_forward(false);  // is traced
  order.request(before_use(0));
  EXPECT_FALSE(order.owes_forward());
}

TEST(Order, OwesNothingWhereNoPassIsOpen) {
  Order order = traced();
  EXPECT_FALSE(order.owes(before_use(0)));
  EXPECT_FALSE(order.on_demand());
  EXPECT_TRUE(order.end_pass().empty());
}

TEST(Order, RefusesARequestWhereNoPassIsOpen) {
  Order order;
  EXPECT_THROW(order.request(before_use(0)), core::InternalError);
}

}  // namespace
}  // namespace dmuon::schedule
