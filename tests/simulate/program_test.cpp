#include "dmuon/simulate/program.h"

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "tests/schedule/triggers.h"
#include "tests/simulate/small_job.h"

namespace dmuon::simulate {
namespace {

using schedule::after_forward;
using schedule::before_use;
using schedule::Kind;
using What = Event::What;

int count(const Program& program, Kind kind, int unit) {
  int found = 0;
  for (const Issue& issue : program.issues) {
    found += issue.operation.kind == kind && issue.operation.unit == unit ? 1 : 0;
  }
  return found;
}

std::vector<schedule::Operation> operations_of(const Program& program, int step) {
  std::vector<schedule::Operation> operations;
  for (const Issue& issue : program.issues) {
    if (issue.step == step) operations.push_back(issue.operation);
  }
  return operations;
}

TEST(Unroll, IssuesAForwardInTheOrderOfItsSchedule) {
  Job job = small_job(1, 2);
  job.events = {{What::kTrainForward}};
  const schedule::PassSchedule pass = schedule::build_pass_schedule(
      job.layout, job.forward, job.forward, schedule::Pass::kTrainForward, job.options);
  std::vector<schedule::Operation> expected;
  for (const auto& at : pass.at) expected.insert(expected.end(), at.begin(), at.end());
  for (const Program& program : unroll(job)) EXPECT_EQ(operations_of(program, 0), expected);
}

TEST(Unroll, CountsTheStepsBeforeAnIssue) {
  Job job = small_job(2, 1);
  job.events = {{What::kTrainForward}, {What::kBackward}, {What::kStep}, {What::kTrainForward}};
  const Program program = unroll(job).front();
  EXPECT_EQ(program.issues.front().step, 0);
  EXPECT_EQ(program.issues.front().version(), 0);
  EXPECT_EQ(program.issues.back().step, 1);
  // What step() publishes is of the version that the next forward reads.
  int num_published = 0;
  for (const Issue& issue : program.issues) {
    if (issue.operation.version != 1) continue;
    EXPECT_EQ(issue.step, 0);
    EXPECT_EQ(issue.version(), 1);
    ++num_published;
  }
  EXPECT_GT(num_published, 0);
}

TEST(Unroll, LeavesOutOnlyTheUsesThatARankSkips) {
  Job job = small_job(1, 2);
  job.events = {{What::kTrainForward}, {What::kBackward}, {What::kStep}};
  job.skips = {{1, 0, 2}, {1, 1, 0}};
  const std::vector<Program> programs = unroll(job);
  EXPECT_EQ(count(programs[1], Kind::kForward, 2), 0);
  EXPECT_EQ(count(programs[1], Kind::kBackward, 0), 0);
  EXPECT_EQ(count(programs[0], Kind::kForward, 2), 1);
  EXPECT_EQ(programs[0].issues.size(), programs[1].issues.size() + 2);
  EXPECT_EQ(count(programs[1], Kind::kRouteIntra, 0), 1);
}

TEST(Unroll, ServesATracedPassOnDemandAndFreesItsLastUnit) {
  Job job = small_job(1, 2);
  job.events = {{What::kTrainForward, 0}};
  const Program program = unroll(job).front();
  const std::vector<Kind> expected{Kind::kPublishIntra, Kind::kAwaitWeights, Kind::kForward,
                                   Kind::kReshard};
  ASSERT_EQ(program.issues.size(), 12U);
  for (std::size_t i = 0; i < program.issues.size(); ++i)
    EXPECT_EQ(program.issues[i].operation.kind, expected[i % 4]) << i;
}

// The route of unit 2 is in flight when unit 1 is not the next one.
TEST(Unroll, FinishesRoutesBeforeTheRestOfAPassThatDeviates) {
  Job job = small_job(1, 2);
  job.events = {{What::kTrainForward}, {What::kBackward, 2}};
  const Program program = unroll(job).front();
  int num_on_demand = 0;
  bool routed = false;
  for (const Issue& issue : program.issues) {
    if (issue.operation.kind == Kind::kRouteIntra && issue.operation.unit == 2) routed = true;
    if (routed && issue.operation.kind == Kind::kFinishRoute) {
      EXPECT_EQ(issue.operation.unit, 2 - num_on_demand);
      ++num_on_demand;
    }
  }
  EXPECT_EQ(num_on_demand, 3);
}

TEST(Unroll, RefusesASkipOutsideTheJob) {
  Job job = small_job(1, 2);
  job.events = {{What::kTrainForward}};
  for (const Skip& skip : {Skip{2, 0, 0}, Skip{0, 1, 0}, Skip{0, 0, 3}, Skip{0, 0, -1}}) {
    job.skips = {skip};
    EXPECT_THROW(unroll(job), core::InvalidArgument);
  }
  job.skips.clear();
  job.batches.pop_back();
  EXPECT_THROW(unroll(job), core::InvalidArgument);
}

// Units of 8 elements, 2 bytes of weights and 4 of gradients each: 48 bytes a unit.
TEST(GrantedBytes, AreLookaheadPlusTwoUnitsInSequence) {
  Job job = small_job(1, 2);
  job.events = {{What::kTrainForward}, {What::kBackward}, {What::kStep}};
  for (const int lookahead : {0, 1, 2, 9}) {
    job.options.lookahead = lookahead;
    EXPECT_EQ(granted_bytes(job), (lookahead + 2) * 48);
  }
  job.options.max_units_in_flight = 3;
  EXPECT_EQ(granted_bytes(job), 3 * 48);
}

TEST(GrantedBytes, CountEveryUseThatIsOpenWhileAnotherBegins) {
  Job job = small_job(1, 2);
  job.options.lookahead = 2;
  job.forward = {before_use(0), before_use(1), after_forward(1), before_use(2), after_forward(2)};
  job.events = {{What::kTrainForward}};
  EXPECT_EQ(granted_bytes(job), (4 + 1) * 48);
  job.reshard_after_forward = false;
  EXPECT_GT(granted_bytes(job), std::int64_t{1} << 40);
}

}  // namespace
}  // namespace dmuon::simulate
