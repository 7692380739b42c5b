// Over random traces: whatever ranks skip of a pass, all of them issue the same.

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "dmuon/schedule/order.h"
#include "tests/schedule/operations.h"

namespace dmuon::schedule {
namespace {

using Operations = std::vector<Operation>;

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
  Operations draw_pass(Action end_of_use) {
    const int num_units = 1 + draw(5);
    Operations pass;
    const int num_uses = 1 + draw(9);
    for (int use = 0; use < num_uses; ++use) {
      const int unit = draw(num_units);
      pass.push_back(unshard(unit));
      pass.push_back({end_of_use, unit});
    }
    return pass;
  }

  // A subsequence: any operation may be left out, up to all of them.
  Operations draw_some(const Operations& pass) {
    const double kept = draw(5) / 4.0;
    Operations some;
    for (const Operation& operation : pass) {
      if (std::uniform_real_distribution<double>(0, 1)(random_) < kept) some.push_back(operation);
    }
    return some;
  }

 private:
  std::mt19937 random_;
};

// What one rank issues in a pass that `owed` opens; as the engine does, it keeps a unit whose
// reshard is not owed.
std::vector<Issue> run_pass(Order* order, std::vector<Issue> owed, const Operations& requests) {
  for (const Operation& operation : requests) {
    const bool kept =
        operation.action == Action::kReshard && !order->on_demand() && !order->owes(operation);
    if (!kept) append(&owed, order->request(operation));
  }
  return owed;
}

// Each unit's releases before the last are not the last, and the last one is.
void expect_last_release_once(const std::vector<Issue>& issues) {
  std::map<int, int> lasts;
  std::map<int, bool> newest;
  for (const Issue& issue : issues) {
    if (issue.operation.action != Action::kRelease) {
      EXPECT_FALSE(issue.last);
      continue;
    }
    lasts[issue.operation.unit] += issue.last ? 1 : 0;
    newest[issue.operation.unit] = issue.last;
  }
  for (const auto& [unit, count] : lasts) {
    EXPECT_EQ(count, 1) << "unit " << unit;
    EXPECT_TRUE(newest[unit]) << "unit " << unit;
  }
}

// The last unit of a training forward is not freed.
Operations replay_of(Operations forward) {
  forward.pop_back();
  return forward;
}

// A rank that skips one of several equal uses asks for an earlier one than it means; its sequence
// must be the others' all the same.
void OrderUnderSkips::check_ranks_with_equal_traces() {
  const Operations forward = draw_pass(Action::kReshard);
  const Operations backward = draw_pass(Action::kRelease);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    Order order;
    run_pass(&order, order.begin_forward(true), forward);
    run_pass(&order, order.begin_backward(), backward);
    EXPECT_TRUE(order.end_pass().empty());
    for (int step = 0; step < kNumSteps; ++step) {
      std::vector<Issue> issued = run_pass(&order, order.begin_forward(true), draw_some(forward));
      const std::size_t before = issued.size();
      append(&issued, order.begin_backward());
      EXPECT_EQ(operations_of(issued), replay_of(forward))
          << before << " before the backward began";
      std::vector<Issue> back = run_pass(&order, {}, draw_some(backward));
      append(&back, order.end_pass());
      EXPECT_EQ(operations_of(back), backward);
      expect_last_release_once(back);
      for (const Issue& issue : issued) EXPECT_FALSE(issue.compare || issue.last);
      for (const Issue& issue : back) EXPECT_FALSE(issue.compare);
    }
  }
}

// Ranks may differ in where a forward ended, too: some call the model, some its submodules.
void OrderUnderSkips::check_forwards_in_a_row() {
  const Operations forward = draw_pass(Action::kReshard);
  Order order;
  run_pass(&order, order.begin_forward(true), forward);
  const Operations replay = replay_of(forward);
  std::vector<Issue> issued = order.begin_forward(true);
  for (int round = 0; round < 12; ++round) {
    const int place = draw(static_cast<int>(replay.size()));
    append(&issued, order.request(replay[static_cast<std::size_t>(place)]));
  }
  append(&issued, order.end_pass());
  ASSERT_EQ(issued.size() % replay.size(), 0U);
  for (std::size_t i = 0; i < issued.size(); ++i) {
    EXPECT_EQ(issued[i].operation, replay[i % replay.size()]);
    EXPECT_FALSE(issued[i].compare);
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
