// Units in which the host framework manages parameters: no rank may pass over a use of one.

#include <gtest/gtest.h>

#include "dmuon/schedule/order.h"
#include "tests/schedule/recorder.h"

namespace dmuon::schedule {
namespace {

using Triggers = std::vector<Trigger>;

// Units 0 to 3 in order, of which 2 is the host's.
const Triggers kUses{before_use(0), after_forward(0), before_use(1), after_forward(1),
                     before_use(2), after_forward(2), before_use(3), after_forward(3)};

// That has traced one forward.
Order traced_order() {
  Order order({false, false, true});
  order.begin_forward(/*training=*/false);
  for (const Trigger& trigger : kUses) order.request(trigger);
  order.end_pass();
  return order;
}

// "0 1 ?3": what is crossed by the trace, and, marked, what is compared.
std::string text_of(const std::vector<Crossing>& crossings) {
  std::string text;
  for (const Crossing& crossing : crossings)
    text += core::message(text.empty() ? "" : ", ", crossing.is_compared() ? "compare " : "",
                          crossing.trigger);
  return text;
}

std::string requested(Order* order, const Triggers& triggers) {
  std::vector<Crossing> crossings;
  for (const Trigger& trigger : triggers) append(&crossings, order->request(trigger));
  return text_of(crossings);
}

TEST(HostOrder, ReplaysAPassThatUsesEveryHostUnit) {
  Order order = traced_order();
  order.begin_forward(false);
  EXPECT_TRUE(order.owes_host_use());
  EXPECT_EQ(requested(&order, {before_use(0), before_use(2)}),
            "before use of 0, after forward of 0, before use of 1, after forward of 1, "
            "before use of 2");
  EXPECT_FALSE(order.owes_host_use());
  EXPECT_EQ(requested(&order, {after_forward(3)}),
            "after forward of 2, before use of 3, after forward of 3");
  EXPECT_FALSE(order.on_demand());
}

// Whatever a rank skipped before: what it issues until the comparison is what the others issue.
TEST(HostOrder, DeviatesRightBeforeAHostUseThatAReplayPassesOver) {
  const std::string expected =
      "before use of 0, after forward of 0, before use of 1, after forward of 1, "
      "compare before use of 3";
  for (const Triggers& used : {Triggers{before_use(0), after_forward(0), before_use(1)},
                               Triggers{before_use(0)}, Triggers{before_use(1)}, Triggers{}}) {
    Order order = traced_order();
    order.begin_forward(false);
    Triggers requests = used;
    requests.push_back(before_use(3));
    EXPECT_EQ(requested(&order, requests), expected) << used.size() << " requests before it";
    EXPECT_TRUE(order.on_demand());
    EXPECT_FALSE(order.owes_host_use());
    EXPECT_TRUE(order.end_pass().empty());
    order.begin_forward(false);
    EXPECT_TRUE(order.on_demand());  // traced again
  }
}

TEST(HostOrder, CatchesUpToAHostUseAndNotOverIt) {
  Order order = traced_order();
  EXPECT_TRUE(order.catch_up_to_host_use().empty());  // no pass is open
  order.begin_forward(false);
  order.request(before_use(1));
  EXPECT_EQ(text_of(order.catch_up_to_host_use()), "after forward of 1");
  EXPECT_TRUE(order.owes_host_use());
  EXPECT_TRUE(order.catch_up_to_host_use().empty());
  EXPECT_EQ(text_of(order.catch_up()),
            "before use of 2, after forward of 2, before use of 3, after forward of 3");
}

// A unit is used several times in some traces: which use a rank has come to is said by its
// position.
TEST(HostOrder, HasAPositionWhileItFollowsATrace) {
  Order order = traced_order();
  EXPECT_EQ(order.position(), -1);
  order.begin_forward(false, /*has_end=*/true);
  EXPECT_EQ(order.position(), 0);
  order.catch_up_to_host_use();
  EXPECT_EQ(order.position(), 4);
  order.request(before_use(2));
  EXPECT_EQ(order.position(), 5);
  order.request(before_use(1));
  EXPECT_EQ(order.position(), -1);  // a deviation
}

// What begins another forward crosses all that the last one owes.
TEST(HostOrder, BeginsNoForwardAgainWhileAHostUseIsOwed) {
  Order order = traced_order();
  order.begin_forward(false);
  requested(&order, {before_use(0), after_forward(0), before_use(1)});
  EXPECT_EQ(requested(&order, {before_use(0)}), "compare before use of 0");
  EXPECT_TRUE(order.on_demand());

  Order other = traced_order();
  other.begin_forward(false);
  requested(&other, {before_use(2)});
  EXPECT_EQ(requested(&other, {before_use(0)}),
            "after forward of 2, before use of 3, after forward of 3, before use of 0");
  EXPECT_FALSE(other.on_demand());
}

/// Three units, of which b is the host's.
class HostResolver : public ResolverTest {
 protected:
  Resolver make_host(bool traced = true) {
    Layout layout = three_units(1, 2);
    layout.units[kB].host = true;
    Resolver resolver(layout, {.lookahead = 0}, batches_of({{0}, {1}, {2}}), &recorder_);
    if (traced) trace(&resolver);
    return resolver;
  }
};

TEST_F(HostResolver, LeavesToTheHostBeforeAUseAfterABackwardAndAtTheEndOfAllOfIt) {
  Resolver resolver = make_host();
  forward(&resolver, {kA, kB, kC});
  EXPECT_EQ(recorder_.take(),
            "leave before a forward, publish intra 0, await weights 0, reshard 0, "
            "publish intra 1, await weights 1, leave before use of 1, reshard 1, "
            "publish intra 2, await weights 2");
  backward(&resolver, {kC, kB, kA});
  EXPECT_EQ(recorder_.take(),
            "reshard 2, route intra 2, finish route intra 2, "
            "publish intra 1, await weights 1, leave before use of 1, "
            "reshard 1, route intra 1, finish route intra 1, leave after backward of 1, "
            "publish intra 0, await weights 0, reshard 0, route intra 0, finish route intra 0, "
            "leave at the end");
}

// It begins with what the host framework gathers for itself, and may use no host unit.
TEST_F(HostResolver, LeavesToTheHostInEveryForward) {
  Resolver resolver = make_host();
  for (const bool trains : {true, false, false}) {
    resolver.begin_forward(trains);
    EXPECT_TRUE(recorder_.take().ends_with("leave before a forward"));
  }
}

// A rank that skipped what is before it may give it inputs that need no gradient; its autograd then
// does not come to the end of the unit's backward, after which the host framework reduces.
TEST_F(HostResolver, ComparesWhereABackwardHasNoEndOfItsOwn) {
  Resolver resolver = make_host();
  forward(&resolver, {kB, kC});
  recorder_.take();
  resolver.begin_backward();
  resolver.before_backward(kC);
  resolver.after_backward(kC);
  resolver.before_backward(kB);
  recorder_.take();
  resolver.end_backward();
  EXPECT_EQ(
      recorder_.take(),
      "compare the end, reshard 1, route intra 1, finish route intra 1, leave after backward of 1, "
      "publish intra 0, await weights 0, reshard 0, route intra 0, finish route intra 0, "
      "leave at the end");
}

TEST_F(HostResolver, ComparesOnlyWhereAllOfAPassIsTraced) {
  Resolver resolver = make_host();
  forward(&resolver, {kA, kB, kC});
  backward(&resolver, {kC, kB, kA});
  resolver.settle_step();
  EXPECT_EQ(recorder_.take().find("compare"), std::string::npos);
  forward(&resolver, {kB});  // others may be skipped
  backward(&resolver, {kB});
  resolver.settle_step();
  EXPECT_EQ(recorder_.take().find("compare"), std::string::npos);
}

// The same in every rank that leaves it out, however it skipped what is before it.
TEST_F(HostResolver, ComparesAtTheEndOfAPassThatLeavesAHostUseOut) {
  for (const std::vector<UnitIndex>& used : {std::vector<UnitIndex>{kA}, {}}) {
    Resolver resolver = make_host();
    forward(&resolver, used);
    resolver.end_pass();
    EXPECT_EQ(recorder_.take(),
              "leave before a forward, "
              "publish intra 0, await weights 0, reshard 0, compare the end, "
              "publish intra 1, await weights 1, leave before use of 1, reshard 1, "
              "publish intra 2, await weights 2");
  }
  for (const std::vector<UnitIndex>& used : {std::vector<UnitIndex>{kC}, {}}) {
    Resolver resolver = make_host();
    backward(&resolver, used);
    EXPECT_EQ(recorder_.take(),
              "publish intra 2, await weights 2, reshard 2, route intra 2, finish route intra 2, "
              "compare the end, "
              "publish intra 1, await weights 1, leave before use of 1, "
              "reshard 1, route intra 1, finish route intra 1, leave after backward of 1, "
              "publish intra 0, await weights 0, reshard 0, route intra 0, finish route intra 0, "
              "leave at the end");
  }
}

// Its backward may have run on the others, with the host's collectives.
TEST_F(HostResolver, ComparesWhereAForwardFollowsOneWithoutABackward) {
  Resolver resolver = make_host();
  forward(&resolver, {kA, kB, kC});
  recorder_.take();
  resolver.begin_forward(true);
  EXPECT_EQ(recorder_.take(), "compare the end, leave before a forward");
  resolver.end_pass();
  recorder_.take();
  backward(&resolver, {kC, kB, kA});
  recorder_.take();
  resolver.begin_forward(true);
  EXPECT_EQ(recorder_.take(), "leave before a forward");

  Resolver without = make(1);
  trace(&without);
  forward(&without, {kA, kB, kC});
  without.settle();
  recorder_.take();
  without.begin_forward(true);
  EXPECT_EQ(recorder_.take(), "");
}

// A unit that is ready is requested all the same: a replay must not pass over it.
TEST_F(HostResolver, RequestsEveryUseOfAHostUnit) {
  Resolver resolver = make_host();
  resolver.begin_forward(true);
  resolver.serve({Moment::kBeforeUse, kB});
  recorder_.take();
  resolver.before_use(kB);
  EXPECT_EQ(recorder_.take(), "publish intra 0, await weights 0, reshard 0, leave before use of 1");
}

}  // namespace
}  // namespace dmuon::schedule
