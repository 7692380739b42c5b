#include "dmuon/simulate/program.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "dmuon/core/error.h"
#include "tests/schedule/three_units.h"
#include "tests/simulate/dry_run.h"
#include "tests/simulate/small_job.h"

namespace dmuon::simulate {
namespace {

using schedule::after_forward;
using schedule::before_use;
using schedule::Kind;
using What = TrainingEvent::What;

template <typename What>
int count(const Program& program, What what, int unit) {
  const schedule::Subject subject = core::UnitIndex(unit);
  return static_cast<int>(std::count_if(
      program.issues.begin(), program.issues.end(),
      [&](const Issue& issue) { return issue.is(what) && issue.operation.subject == subject; }));
}

// What an event issues, such as "await weights 0, forward 0".
std::string text_of(const Program& program, int event) {
  std::string text;
  for (const Issue& issue : program.issues) {
    if (issue.event != event) continue;
    const std::string use = issue.is(Compute::kForward) ? "forward" : "backward";
    text += (text.empty() ? "" : ", ") +
            (issue.compute ? core::message(use, ' ', issue.unit()) : text_of(issue.operation));
  }
  return text;
}

const std::vector<TrainingEvent> kStep{{What::kTrainForward}, {What::kBackward}, {What::kStep}};

std::vector<TrainingEvent> steps(int num_steps) {
  std::vector<TrainingEvent> events;
  for (int step = 0; step < num_steps; ++step)
    events.insert(events.end(), kStep.begin(), kStep.end());
  return events;
}

TEST(Unroll, ServesATracedPassOnDemand) {
  Job job = small_job(1, 2);
  job.events = {{What::kTrainForward}};
  for (const Program& program : unroll(job)) {
    EXPECT_EQ(text_of(program, 0),
              "publish intra 0, await weights 0, forward 0, reshard 0, "
              "publish intra 1, await weights 1, forward 1, reshard 1, "
              "publish intra 2, await weights 2, forward 2, reshard 2");
  }
}

// The step sends the first weights, the forward keeps the last unit, and the backward frees it.
TEST(Unroll, LeavesOutWhatHasBeenDoneInAReplay) {
  Job job = small_job(2, 2);
  job.events = steps(3);
  for (const Program& program : unroll(job)) {
    EXPECT_EQ(text_of(program, 6),
              "publish intra 1, await weights 0, forward 0, reshard 0, "
              "publish intra 2, await weights 1, forward 1, reshard 1, "
              "await weights 2, forward 2");
    EXPECT_EQ(text_of(program, 7),
              "publish intra 1, backward 2, reshard 2, route intra 2, route inter 2, "
              "publish intra 0, await weights 1, backward 1, reshard 1, finish route intra 2, "
              "route intra 1, route inter 1, await weights 0, backward 0, reshard 0, "
              "finish route intra 1, finish route inter 2, route intra 0, route inter 0");
    EXPECT_EQ(text_of(program, 8),
              "finish route inter 1, finish route intra 0, finish route inter 0, " +
                  schedule::update(0) + ", " + schedule::update(1) + ", " + schedule::update(2) +
                  ", finish update 0, publish inter 0, publish intra 0, finish update 1, "
                  "publish inter 1, finish update 2, publish inter 2");
  }
}

TEST(Unroll, CountsTheStepsBeforeAnIssue) {
  Job job = small_job(2, 1);
  job.events = steps(1);
  job.events.push_back({What::kTrainForward});
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
  job.events = steps(2);
  const core::Owner other(1);
  job.skips = {{core::Slot(1), 3, core::UnitIndex(2)}, {core::Slot(1), 4, core::UnitIndex(0)}};
  const Programs programs = unroll(job);
  EXPECT_EQ(count(programs[other], Compute::kForward, 2), 1);
  EXPECT_EQ(count(programs[other], Compute::kBackward, 0), 1);
  EXPECT_EQ(count(programs.front(), Compute::kForward, 2), 2);
  EXPECT_EQ(programs.front().num_issues(), programs[other].num_issues() + 2);
  EXPECT_EQ(count(programs[other], Kind::kRouteIntra, 0), 2);
}

// A rank whose loss touches nothing takes part in the others' backward when it steps.
TEST(Unroll, RunsABackwardThatARankLeavesOutBeforeTheStep) {
  Job job = small_job(2, 1);
  job.events = steps(2);
  const core::Owner other(1);
  for (const core::UnitIndex unit : job.layout.units.indices())
    job.skips.push_back({core::Slot(1), 4, unit});
  const Programs programs = unroll(job);
  EXPECT_EQ(text_of(programs[other], 4), "");
  for (int unit = 0; unit < 3; ++unit) {
    EXPECT_EQ(count(programs[other], Compute::kBackward, unit), 1);
    EXPECT_EQ(count(programs[other], Kind::kRouteInter, unit), 2);
  }
}

// Unit 2 is in neither order what comes next.
TEST(Unroll, ComparesTheRestOfAPassThatDeviatesAndTracesTheNext) {
  Job job = small_job(1, 2);
  job.events = steps(2);
  job.events[3].instead = {before_use(0), after_forward(0), before_use(2), after_forward(2),
                           before_use(1), after_forward(1), before_use(2), after_forward(2)};
  job.events.push_back({What::kTrainForward});
  const Program program = unroll(job).front();
  const auto num_comparisons = [&](int num_events) {
    Job begun = job;
    begun.events.resize(static_cast<std::size_t>(num_events));
    return unroll(begun).front().comparisons.size();
  };
  EXPECT_EQ(num_comparisons(1), 7U);       // six triggers and the end
  EXPECT_EQ(num_comparisons(2), 7U + 7U);  // likewise
  EXPECT_EQ(num_comparisons(3), 7U + 7U);
  EXPECT_EQ(num_comparisons(4), 7U + 7U);
  job.events[3].instead = {before_use(2), after_forward(2), before_use(1), after_forward(1)};
  EXPECT_EQ(num_comparisons(4), 7U + 7U);
}

TEST(Unroll, RefusesASkipOutsideTheJob) {
  Job job = small_job(1, 2);
  job.events = {{What::kTrainForward}};
  for (const auto& [slot, event, unit] : {std::tuple{2, 0, 0}, {0, 1, 0}, {0, 0, 3}, {0, 0, -1}}) {
    job.skips = {{core::Slot(slot), event, core::UnitIndex(unit)}};
    EXPECT_THROW(unroll(job), core::InvalidArgument);
  }
  job.skips.clear();
  job.batches.resize(1);
  EXPECT_THROW(unroll(job), core::InvalidArgument);
}

TEST(WaitsOn, LetsMessagesBeginBesideThoseBeforeThem) {
  Job job = small_job(2, 1);
  job.events = {{What::kTrainForward}, {What::kBackward}, {What::kStep}};
  const Program program = unroll(job)[core::Owner(0)];
  const std::vector<Frontier> waits = waits_on(program);
  Frontier last = kNothing;
  int num_beside = 0;
  for (int i = 0; i < program.num_issues(); ++i) {
    const Frontier& own = waits[static_cast<std::size_t>(i)];
    const schedule::Lane lane = program.issue(i).lane();
    if (lane == schedule::Lane::kUpdate) {
      EXPECT_EQ(own[lane], last[lane]);
    }
    if (lane == schedule::Lane::kInter && last[lane] >= 0) num_beside += own[lane] < last[lane];
    last[lane] = i;
  }
  EXPECT_GE(num_beside, 4);  // publications and routes of three units
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
  job.forward = {before_use(0), before_use(1),    after_forward(1),
                 before_use(2), after_forward(2), after_forward(0)};
  job.events = {{What::kTrainForward}};
  EXPECT_EQ(granted_bytes(job), (4 + 1) * 48);
  job.options.reshard_after_forward = false;
  EXPECT_GT(granted_bytes(job), std::int64_t{1} << 40);
}

}  // namespace
}  // namespace dmuon::simulate
