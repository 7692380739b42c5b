#include "tests/simulate/dry_run.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "dmuon/core/error.h"
#include "tests/simulate/small_job.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;
using schedule::Lane;
using What = TrainingEvent::What;

Job two_steps(int num_replicates, int num_shards) {
  Job job = small_job(num_replicates, num_shards);
  job.events = {{What::kTrainForward}, {What::kBackward}, {What::kStep},
                {What::kTrainForward}, {What::kBackward}, {What::kStep}};
  return job;
}

DryRun run_with(const Job& job, const Programs& programs) {
  return dry_run(programs, job.options.node_copy, granted_bytes(job), {.seed = 1});
}

bool says(const DryRun& run, const std::string& text) {
  return std::any_of(
      run.violations.begin(), run.violations.end(),
      [&](const std::string& violation) { return violation.find(text) != std::string::npos; });
}

std::size_t find(const Program& program, Kind kind, int unit) {
  for (std::size_t i = 0; i < program.issues.size(); ++i) {
    if (program.issues[i].is(kind) && program.issues[i].unit() == core::UnitIndex(unit)) return i;
  }
  ADD_FAILURE() << "no " << schedule::name_of(kind) << " of unit " << unit;
  return 0;
}

void erase(Program* program, std::size_t index) {
  program->issues.erase(program->issues.begin() + static_cast<std::ptrdiff_t>(index));
}

TEST(DryRun, FindsNothingWrongWithSmallMeshes) {
  for (const auto& [replicates, shards] : {std::pair{1, 1}, {1, 4}, {4, 1}, {2, 2}, {2, 4}}) {
    for (const bool rendezvous : {false, true}) {
      const DryRun run = dry_run(two_steps(replicates, shards), {.rendezvous = rendezvous});
      EXPECT_EQ(run.violations, std::vector<std::string>{});
      EXPECT_EQ(run.timeline.size(), replicates * shards);
    }
  }
}

// On demand: weights of 16 bytes, gradients of 32 and an inbox of 32, but weights go first.
TEST(DryRun, CountsTheLargestBytesOfARank) {
  Job job = two_steps(1, 2);
  job.options.lookahead = 0;
  EXPECT_EQ(dry_run(job, {}).peak_bytes, 64);
  // Two units' weights, one's gradients, and two routes of gradients and inbox.
  job.options.lookahead = 2;
  EXPECT_EQ(dry_run(job, {}).peak_bytes, 16 + 2 * 64 + 32);
}

TEST(DryRun, SaysWhoTakesMoreBytesThanGranted) {
  const Job job = two_steps(1, 2);
  const DryRun run = dry_run(unroll(job), true, 100, {});
  EXPECT_TRUE(says(run, "rank 1: takes 176 bytes, granted are 100"));
}

TEST(DryRun, LanesRunInOrderAndNothingStartsBeforeItWasIssued) {
  const Job job = two_steps(2, 2);
  const DryRun run = dry_run(job, {.seed = 3});
  for (const std::vector<SimulatedSpan>& spans : run.timeline) {
    schedule::PerLane<double> end_us{};
    Frontier issue = kNothing;
    for (const SimulatedSpan& span : spans) {
      const Lane lane = span.lane;
      EXPECT_GT(span.issue, issue[lane]);
      EXPECT_GE(span.start_us, end_us[lane]);
      EXPECT_GE(span.start_us, span.issued_us);
      EXPECT_GE(span.end_us, span.start_us);
      end_us[lane] = span.end_us;
      issue[lane] = span.issue;
    }
  }
}

TEST(DryRun, IsDeterministicAndItsDelaysFollowTheSeed) {
  const Job job = two_steps(2, 2);
  const auto end_us = [&](std::uint32_t seed) {
    return dry_run(job, {.seed = seed}).timeline.front().back().end_us;
  };
  EXPECT_EQ(end_us(1), end_us(1));
  EXPECT_NE(end_us(1), end_us(2));
}

// The weights of unit 1 travel while unit 0 computes, if they may.
TEST(DryRun, ShowsThatLookaheadOverlaps) {
  const auto end_us = [](int lookahead) {
    Job job = two_steps(2, 2);
    for (int step = 0; step < 4; ++step) {
      for (const What what : {What::kTrainForward, What::kBackward, What::kStep})
        job.events.push_back({what});
    }
    job.options.lookahead = lookahead;
    double total_us = 0;
    for (std::uint32_t seed = 0; seed < 20; ++seed)
      total_us += dry_run(job, {.seed = seed}).timeline.front().back().end_us;
    return total_us;
  };
  EXPECT_LT(end_us(2), 0.9 * end_us(0));
}

TEST(DryRun, FindsARankThatWaitsForEver) {
  const Job job = two_steps(1, 2);
  Programs programs = unroll(job);
  while (programs[core::Owner(1)].issues.size() > 3) programs[core::Owner(1)].issues.pop_back();
  const DryRun run = run_with(job, programs);
  EXPECT_TRUE(says(run, "rank 0, ")) << testing::PrintToString(run.violations);
  EXPECT_TRUE(says(run, "waits forever for another member of a group"));
}

TEST(DryRun, FindsOperationsInAnotherOrder) {
  const Job job = two_steps(2, 2);
  Programs programs = unroll(job);
  // Both are issued at the first trigger; no rank has two groups in common with another.
  Program& last = programs[core::Owner(3)];
  std::swap(last.issues[find(last, Kind::kPublishInter, 0)],
            last.issues[find(last, Kind::kPublishIntra, 0)]);
  EXPECT_TRUE(says(run_with(job, programs),
                   "rank 3: publish intra of unit 0 is issued where rank 0 issues publish inter"));
}

TEST(DryRun, FindsAWaitForWhatWasNeverIssued) {
  const Job job = two_steps(1, 2);
  Programs programs = unroll(job);
  for (Program& program : programs) erase(&program, find(program, Kind::kPublishIntra, 0));
  const DryRun run = run_with(job, programs);
  EXPECT_TRUE(says(run, "waits for publish intra of unit 0, which was never issued"));
  EXPECT_TRUE(says(run, "await weights of unit 0: reads packed weights that are free"));
}

TEST(DryRun, FindsARaceThatTheDelaysHide) {
  const Job job = two_steps(2, 2);
  Programs programs = unroll(job);
  for (Program& program : programs)
    program.issues[find(program, Kind::kRouteInter, 2)].operation.after.clear();
  // However late stage 2 comes, it may come too early.
  const DryRun run =
      dry_run(programs, true, granted_bytes(job), {.compute_us = 0, .message_us = 0});
  EXPECT_TRUE(says(run, "route inter of unit 2: may run at the same time as issue"));
  EXPECT_TRUE(says(run, "uses the node's sum too"));
}

TEST(DryRun, FindsAnOldVersion) {
  const Job job = two_steps(1, 2);
  Programs programs = unroll(job);
  for (Program& program : programs) {
    // What is left of the old version is taken for the new one.
    std::erase_if(program.issues, [](const Issue& issue) {
      return issue.operation.subject == schedule::Subject(core::UnitIndex(0)) &&
             (issue.is(Kind::kReshard) || (issue.is(Kind::kPublishIntra) && issue.version() == 1));
    });
  }
  EXPECT_TRUE(
      says(run_with(job, programs), "forward of unit 0: reads versions 0 to 0, expected 1"));
}

TEST(DryRun, FindsGradientsThatAreLost) {
  const Job job = two_steps(2, 2);
  Programs programs = unroll(job);
  for (Program& program : programs) {
    for (const Kind kind :
         {Kind::kRouteIntra, Kind::kRouteInter, Kind::kFinishRouteIntra, Kind::kFinishRouteInter})
      erase(&program, find(program, kind, 1));
  }
  EXPECT_TRUE(says(run_with(job, programs),
                   "the gradients of unit 1 are not what all ranks put in, each once"));
}

// A batch is prepared from the gradients of all ranks, and its masters leave when it was applied.
TEST(DryRun, FindsAnUpdateOutOfTurn) {
  const Job job = two_steps(1, 2);
  const auto without = [&](Kind kind) {
    Programs programs = unroll(job);
    for (Program& program : programs)
      std::erase_if(program.issues, [&](const Issue& issue) { return issue.is(kind); });
    return run_with(job, programs);
  };
  EXPECT_TRUE(says(without(Kind::kPrepare), "orthogonalise of batch 0: comes out of turn"));
  EXPECT_TRUE(says(without(Kind::kOrthogonalise), "apply of batch 0: comes out of turn"));
  EXPECT_TRUE(says(without(Kind::kApply), "waits for apply of batch 0, which was never issued"));
  EXPECT_TRUE(says(without(Kind::kFinishUpdate), "the update of batch 2 is never finished"));
}

// Sums of micro-steps stay at the column members until one that is synchronized.
TEST(DryRun, CountsGradientsUnderNoSyncOnce) {
  Job job = small_job(2, 2);
  job.events = {{What::kTrainForward},
                {What::kBackwardNoSync},
                {What::kTrainForward},
                {What::kBackward},
                {What::kStep}};
  EXPECT_EQ(dry_run(job, {}).violations, std::vector<std::string>{});
  job.events[3].what = What::kBackwardNoSync;  // step() sends them on
  EXPECT_EQ(dry_run(job, {}).violations, std::vector<std::string>{});
  Programs programs = unroll(job);
  for (Program& program : programs) {
    std::erase_if(program.issues, [](const Issue& issue) { return issue.is(Kind::kRouteInter); });
  }
  EXPECT_TRUE(says(run_with(job, programs), "are not what all ranks put in"));
}

TEST(DryRun, RefusesProgramsOfAnotherMesh) {
  const Job job = two_steps(1, 2);
  Programs programs = unroll(job);
  EXPECT_THROW(run_with(job, {programs.front()}), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::simulate
