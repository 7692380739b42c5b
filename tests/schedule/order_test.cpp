#include "dmuon/schedule/order.h"

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "tests/schedule/operations.h"

namespace dmuon::schedule {
namespace {

using Operations = std::vector<Operation>;

// Units 0, 1 and 2 in order, each freed after its use.
const Operations kForward{unshard(0), reshard(0), unshard(1), reshard(1), unshard(2), reshard(2)};
// What a replay issues of it: the backward begins with unit 2, so it stays.
const Operations kReplay{unshard(0), reshard(0), unshard(1), reshard(1), unshard(2)};
const Operations kBackward{unshard(2), release(2), unshard(1), release(1), unshard(0), release(0)};

std::vector<Issue> request_all(Order* order, const Operations& operations) {
  std::vector<Issue> issues;
  for (const Operation& operation : operations) append(&issues, order->request(operation));
  return issues;
}

// An order that has traced one pass of each kind and has none open.
Order traced() {
  Order order;
  order.begin_forward(/*training=*/true);
  request_all(&order, kForward);
  order.begin_backward();
  request_all(&order, kBackward);
  order.end_pass();
  return order;
}

bool all_compare(const std::vector<Issue>& issues) {
  for (const Issue& issue : issues) {
    if (!issue.compare) return false;
  }
  return true;
}

bool none_compares(const std::vector<Issue>& issues) {
  for (const Issue& issue : issues) {
    if (issue.compare) return false;
  }
  return true;
}

TEST(Order, ComparesEachRequestOfATracedPassAndIssuesNothingElse) {
  Order order;
  EXPECT_TRUE(order.begin_forward(true).empty());
  EXPECT_TRUE(order.on_demand());
  for (const Operation& operation : kForward) {
    const std::vector<Issue> issues = order.request(operation);
    EXPECT_EQ(operations_of(issues), Operations{operation});
    EXPECT_TRUE(all_compare(issues));
    EXPECT_FALSE(order.owes(operation));
  }
  EXPECT_TRUE(order.end_pass().empty());
  EXPECT_FALSE(order.current().has_value());
}

TEST(Order, ReplaysAPassWithoutComparison) {
  Order order = traced();
  std::vector<Issue> issues = order.begin_forward(true);
  EXPECT_FALSE(order.on_demand());
  append(&issues, request_all(&order, kReplay));
  EXPECT_EQ(operations_of(issues), kReplay);
  EXPECT_TRUE(none_compares(issues));
  EXPECT_FALSE(order.owes(reshard(2)));
  EXPECT_TRUE(order.end_pass().empty());
}

TEST(Order, IssuesWhatWasSkippedBeforeTheRequest) {
  Order order = traced();
  order.begin_forward(true);
  EXPECT_EQ(operations_of(order.request(unshard(0))), Operations{unshard(0)});
  EXPECT_TRUE(order.owes(reshard(1)));
  const Operations expected{reshard(0), unshard(1), reshard(1), unshard(2)};
  EXPECT_EQ(operations_of(order.request(unshard(2))), expected);
  EXPECT_FALSE(order.owes(reshard(1)));
}

TEST(Order, IssuesTheRestAtTheEndOfAPass) {
  Order order = traced();
  order.begin_forward(true);
  order.request(unshard(1));
  const std::vector<Issue> rest = order.end_pass();
  EXPECT_EQ(operations_of(rest), (Operations{reshard(1), unshard(2)}));
  EXPECT_TRUE(none_compares(rest));
}

TEST(Order, IssuesTheRestOfAForwardWhenItsBackwardBegins) {
  Order order = traced();
  order.begin_forward(true);
  order.request(unshard(1));
  EXPECT_EQ(operations_of(order.begin_backward()), (Operations{reshard(1), unshard(2)}));
  EXPECT_EQ(order.current(), Pass::kBackward);
}

TEST(Order, IssuesAWholePassForARankThatUsedNothing) {
  Order order = traced();
  order.begin_backward();
  EXPECT_EQ(operations_of(order.end_pass()), kBackward);
}

TEST(Order, StartsTheNextForwardAtARequestThatLiesBehind) {
  Order order = traced();
  order.begin_forward(true);
  request_all(&order, {unshard(0), reshard(0), unshard(1)});
  // The model is driven through its submodules: no begin_forward.
  const std::vector<Issue> issues = order.request(unshard(0));
  const Operations expected{reshard(1), unshard(2), unshard(0)};
  EXPECT_EQ(operations_of(issues), expected);
  EXPECT_TRUE(none_compares(issues));
  EXPECT_EQ(order.current(), Pass::kTrainForward);
  EXPECT_TRUE(order.owes(unshard(1)));
}

TEST(Order, ServesADeviationOnDemandAndTracesTheNextPassAgain) {
  Order order = traced();
  order.begin_forward(true);
  order.request(unshard(0));
  const std::vector<Issue> stranger = order.request(unshard(7));
  EXPECT_EQ(operations_of(stranger), Operations{unshard(7)});
  EXPECT_TRUE(all_compare(stranger));
  EXPECT_TRUE(order.on_demand());
  // The trace no longer holds: what it has ahead is neither issued early nor owed.
  const std::vector<Issue> known = order.request(unshard(2));
  EXPECT_EQ(operations_of(known), Operations{unshard(2)});
  EXPECT_TRUE(all_compare(known));
  EXPECT_TRUE(order.end_pass().empty());

  const Operations changed{unshard(2), unshard(0)};
  order.begin_forward(true);
  EXPECT_TRUE(order.on_demand());
  EXPECT_TRUE(all_compare(request_all(&order, changed)));
  EXPECT_TRUE(order.end_pass().empty());

  order.begin_forward(true);
  EXPECT_FALSE(order.on_demand());
  EXPECT_EQ(operations_of(order.end_pass()), changed);
}

TEST(Order, KeepsOtherTracesWhenOnePassDeviates) {
  Order order = traced();
  order.begin_forward(true);
  order.request(unshard(7));
  order.begin_backward();
  EXPECT_FALSE(order.on_demand());
  EXPECT_EQ(operations_of(order.end_pass()), kBackward);
}

TEST(Order, TakesABackwardRequestThatLiesBehindForADeviation) {
  Order order = traced();
  order.begin_backward();
  request_all(&order, {unshard(2), release(2)});
  const std::vector<Issue> issues = order.request(unshard(2));
  EXPECT_EQ(operations_of(issues), Operations{unshard(2)});
  EXPECT_TRUE(all_compare(issues));
  EXPECT_TRUE(order.on_demand());
}

TEST(Order, MarksTheLastReleaseOfEachUnitOnceInAReplay) {
  const Operations backward{unshard(1), release(1), unshard(0), release(0),
                            unshard(1), release(1), unshard(0), release(0)};
  Order order;
  order.begin_backward();
  request_all(&order, backward);
  order.end_pass();
  order.begin_backward();
  std::vector<Issue> issues = order.request(release(0));
  append(&issues, order.end_pass());
  std::vector<bool> last;
  for (const Issue& issue : issues) last.push_back(issue.last);
  EXPECT_EQ(operations_of(issues), backward);
  EXPECT_EQ(last, (std::vector<bool>{false, false, false, false, false, true, false, true}));
}

TEST(Order, TakesEveryReleaseOfATracedPassForTheLast) {
  Order order;
  order.begin_backward();
  for (const Operation& operation : {unshard(0), release(0), unshard(0), release(0)}) {
    const bool is_release = operation.action == Action::kRelease;
    EXPECT_EQ(order.request(operation).back().last, is_release);
  }
}

TEST(Order, TracesTrainingAndEvaluationForwardsSeparately) {
  Order order = traced();
  order.begin_forward(/*training=*/false);
  EXPECT_EQ(order.current(), Pass::kEvalForward);
  EXPECT_TRUE(order.on_demand());
  EXPECT_TRUE(all_compare(request_all(&order, {unshard(1), reshard(1)})));
  order.begin_forward(/*training=*/true);
  EXPECT_EQ(operations_of(order.end_pass()), kReplay);
  // No backward follows an evaluation: its last unit is freed.
  order.begin_forward(/*training=*/false);
  EXPECT_EQ(operations_of(order.end_pass()), (Operations{unshard(1), reshard(1)}));
}

TEST(Order, OwesNothingWhereNoPassIsOpen) {
  Order order = traced();
  EXPECT_FALSE(order.owes(unshard(0)));
  EXPECT_FALSE(order.on_demand());
  EXPECT_TRUE(order.end_pass().empty());
}

TEST(Order, RefusesARequestWhereNoPassIsOpen) {
  Order order;
  EXPECT_THROW(order.request(unshard(0)), core::InternalError);
}

}  // namespace
}  // namespace dmuon::schedule
