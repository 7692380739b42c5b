#include "dmuon/simulate/critical_path.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tests/simulate/small_job.h"

namespace dmuon::simulate {
namespace {

using core::Owner;
using schedule::Kind;
using schedule::Lane;
using What = TrainingEvent::What;

using WorkUs = std::function<double(Owner, const Issue&)>;

// Messages take 1 us for each 4 bytes.
class Given : public Durations {
 public:
  Given(bool rendezvous, WorkUs work_us) : rendezvous_(rendezvous), work_us_(std::move(work_us)) {}
  double work_us(Owner rank, const Issue& issue) override { return work_us_(rank, issue); }
  double message_us(Owner, const Issue&, const schedule::Message& message) override {
    return static_cast<double>(message.bytes) / 4;
  }
  bool rendezvous() const override { return rendezvous_; }

 private:
  bool rendezvous_;
  WorkUs work_us_;
};

Programs two_steps(int num_replicates, int num_shards, bool late_updates) {
  Job job = small_job(num_replicates, num_shards);
  job.options.late_updates = late_updates;
  for (const What what : {What::kTrainForward, What::kBackward, What::kStep}) {
    job.events.push_back({what});
  }
  job.events.insert(job.events.end(), job.events.begin(), job.events.end());
  return unroll(job);
}

// The parts of each operation's path cover the time from 0 to its end.
TEST(CriticalPath, HasNoGap) {
  for (const bool rendezvous : {false, true}) {
    for (const bool late : {false, true}) {
      const Programs programs = two_steps(2, 2, late);
      Given durations(rendezvous, [](Owner rank, const Issue& issue) {
        return issue.compute ? 1 + rank.value() : 3.5 * ((rank.value() * 7 + issue.step) % 4);
      });
      const Execution execution = execute(programs, durations);
      ASSERT_TRUE(execution.violations.empty());
      for (const Owner rank : programs.indices()) {
        for (const SimulatedSpan& span : execution.timeline[rank]) {
          double at_us = 0;
          for (const PathPart& part : critical_path(execution, rank, span.issue, 0)) {
            EXPECT_EQ(part.begin_us, at_us);
            EXPECT_LT(part.begin_us, part.end_us);
            at_us = part.end_us;
          }
          EXPECT_EQ(at_us, span.end_us);
        }
      }
    }
  }
}

// If work on the path takes longer, the end comes later by as much.
TEST(CriticalPath, IsWhatTheEndWaitsFor) {
  constexpr double kMoreUs = 0.125;
  const Programs programs = two_steps(2, 2, true);
  const auto work_us = [](Owner rank, const Issue& issue) {
    return issue.compute ? 1.0 + rank.value() : 2 + 3.5 * ((rank.value() * 7 + issue.step) % 4);
  };
  Given durations(true, work_us);
  const Execution execution = execute(programs, durations);
  const SimulatedSpan& last = execution.timeline.front().back();
  int num_work = 0;
  for (const PathPart& part : critical_path(execution, Owner(0), last.issue, 0)) {
    const Issue& on_path = programs[part.rank].issue(part.issue);
    if (on_path.carries_messages()) continue;
    Given longer(true, [&](Owner rank, const Issue& issue) {
      return work_us(rank, issue) + (&issue == &on_path ? kMoreUs : 0);
    });
    EXPECT_EQ(execute(programs, longer).timeline.front().back().end_us, last.end_us + kMoreUs);
    ++num_work;
  }
  EXPECT_GT(num_work, 5);
}

// One owner's update takes long. What other ranks then wait for is neither their own lanes nor a
// message.
TEST(CriticalPath, GoesThroughTheRankThatIsLate) {
  constexpr double kLongUs = 1000;
  for (const bool rendezvous : {false, true}) {
    const Programs programs = two_steps(2, 2, true);
    Given durations(rendezvous, [](Owner rank, const Issue& issue) {
      return issue.is(Kind::kOrthogonalise) && rank == Owner(3) ? kLongUs : 1;
    });
    const Execution execution = execute(programs, durations);
    const auto& timeline = execution.timeline.front();
    const auto longest = std::ranges::max_element(timeline, {}, [&](const SimulatedSpan& span) {
      return span.lane == Lane::kCompute ? span.start_us - span.issued_us : 0;
    });
    const Issue& waits = programs.front().issue(longest->issue);
    EXPECT_TRUE(waits.is(Kind::kAwaitWeights));
    double of_update_us = 0;
    for (const PathPart& part :
         critical_path(execution, Owner(0), longest->issue, longest->issued_us)) {
      EXPECT_GE(part.begin_us, longest->issued_us);
      if (programs[part.rank].issue(part.issue).lane() != Lane::kUpdate) continue;
      EXPECT_EQ(part.rank, Owner(3));
      of_update_us += part.end_us - part.begin_us;
    }
    EXPECT_GT(of_update_us, 0.9 * (longest->start_us - longest->issued_us));
  }
}

}  // namespace
}  // namespace dmuon::simulate
