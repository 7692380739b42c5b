// Over random traces: whatever ranks skip of a pass, all of them issue the same.

#include <gtest/gtest.h>

#include <random>

#include "dmuon/schedule/order.h"
#include "tests/schedule/triggers.h"

namespace dmuon::schedule {
namespace {

using Triggers = std::vector<Trigger>;

constexpr int kNumRanks = 4;
constexpr int kNumSteps = 4;
constexpr int kNumTraces = 25;  // a seed

class OrderUnderSkips : public testing::TestWithParam<unsigned> {
 protected:
  OrderUnderSkips() : random_(GetParam()) {}

  void check_ranks_with_equal_traces();
  void check_forwards_in_a_row();

  int draw(int end) { return std::uniform_int_distribution<int>(0, end - 1)(random_); }

  // Every use of a unit is one pair; units may come several times, as shared modules do.
  Triggers draw_pass(Moment end_of_use) {
    const int num_units = 1 + draw(5);
    Triggers pass;
    const int num_uses = 1 + draw(9);
    for (int use = 0; use < num_uses; ++use) {
      const int unit = draw(num_units);
      pass.push_back(before_use(unit));
      pass.push_back({end_of_use, core::UnitIndex(unit)});
    }
    return pass;
  }

  // A subsequence: any trigger may be left out, up to all of them.
  Triggers draw_some(const Triggers& pass) {
    const double kept = draw(5) / 4.0;
    Triggers some;
    for (const Trigger& trigger : pass) {
      if (std::uniform_real_distribution<double>(0, 1)(random_) < kept) some.push_back(trigger);
    }
    return some;
  }

 private:
  std::mt19937 random_;
};

// What one rank issues in the open pass; as the engine does, it keeps a unit whose reshard is not
// owed.
std::vector<Crossing> run_pass(Order* order, const Triggers& requests) {
  std::vector<Crossing> issued;
  for (const Trigger& trigger : requests) {
    const bool kept =
        trigger.moment == Moment::kAfterForward && !order->on_demand() && !order->owes(trigger);
    if (!kept) append(&issued, order->request(trigger));
  }
  return issued;
}

// The last unit of a training forward is not freed.
Triggers replay_of(Triggers forward) {
  forward.pop_back();
  return forward;
}

// A rank that skips one of several equal uses asks for an earlier one than it means; its sequence
// must be the others' all the same.
void OrderUnderSkips::check_ranks_with_equal_traces() {
  const Triggers forward = draw_pass(Moment::kAfterForward);
  const Triggers backward = draw_pass(Moment::kAfterBackward);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    Order order;
    order.begin_forward(true);
    run_pass(&order, forward);
    EXPECT_TRUE(order.end_pass().empty());
    order.begin_backward();
    run_pass(&order, backward);
    EXPECT_TRUE(order.end_pass().empty());
    for (int step = 0; step < kNumSteps; ++step) {
      order.begin_forward(true);
      std::vector<Crossing> issued = run_pass(&order, draw_some(forward));
      const std::size_t before = issued.size();
      append(&issued, order.end_pass());
      EXPECT_EQ(triggers_of(issued), replay_of(forward)) << before << " before the pass ended";
      order.begin_backward();
      std::vector<Crossing> back = run_pass(&order, draw_some(backward));
      append(&back, order.end_pass());
      EXPECT_EQ(triggers_of(back), backward);
      for (const Crossing& issue : issued) EXPECT_FALSE(issue.is_compared());
      for (const Crossing& issue : back) EXPECT_FALSE(issue.is_compared());
    }
  }
}

// Ranks may differ in where a forward ended, too: some call the model, some its submodules.
void OrderUnderSkips::check_forwards_in_a_row() {
  const Triggers forward = draw_pass(Moment::kAfterForward);
  Order order;
  order.begin_forward(true);
  run_pass(&order, forward);
  EXPECT_TRUE(order.end_pass().empty());
  const Triggers replay = replay_of(forward);
  order.begin_forward(true);
  std::vector<Crossing> issued;
  for (int round = 0; round < 12; ++round) {
    const int place = draw(static_cast<int>(replay.size()));
    append(&issued, order.request(replay[static_cast<std::size_t>(place)]));
  }
  append(&issued, order.end_pass());
  ASSERT_EQ(issued.size() % replay.size(), 0U);
  for (std::size_t i = 0; i < issued.size(); ++i) {
    EXPECT_EQ(issued[i].trigger, replay[i % replay.size()]);
    EXPECT_FALSE(issued[i].is_compared());
  }
}

TEST_P(OrderUnderSkips, AllRanksIssueTheTraceInItsOrder) {
  for (int i = 0; i < kNumTraces; ++i) check_ranks_with_equal_traces();
}

TEST_P(OrderUnderSkips, ForwardsInARowAreWholeTraces) {
  for (int i = 0; i < kNumTraces; ++i) check_forwards_in_a_row();
}

INSTANTIATE_TEST_SUITE_P(FixedSeeds, OrderUnderSkips, testing::Range(0U, 8U));

}  // namespace
}  // namespace dmuon::schedule
