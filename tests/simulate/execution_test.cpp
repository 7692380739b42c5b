#include "dmuon/simulate/execution.h"

#include <gtest/gtest.h>

#include "dmuon/core/error.h"
#include "tests/simulate/small_job.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;
using What = TrainingEvent::What;

constexpr double kByteUs = 10;

class ByBytes : public Durations {
 public:
  double work_us(core::Owner, const Issue& issue) override { return issue.compute ? 1 : 0.5; }
  double message_us(core::Owner, const Issue&, const schedule::Message& message) override {
    return kByteUs * static_cast<double>(message.bytes);
  }
};

Execution run(const Programs& programs, Witness* witness = nullptr) {
  ByBytes durations;
  return execute(programs, durations, witness);
}

Programs steps_on(int num_replicates, int num_shards, int num_steps = 2) {
  Job job = small_job(num_replicates, num_shards);
  for (int step = 0; step < num_steps; ++step) {
    for (const What what : {What::kTrainForward, What::kBackward, What::kStep})
      job.events.push_back({what});
  }
  return unroll(job);
}

TEST(Execute, TakesAsLongAsComputeWhereARankIsAlone) {
  EXPECT_EQ(run(steps_on(1, 1)).timeline.front().back().end_us, 2 * (3 * 1 + 3 * 1 + 3 * 3 * 0.5));
}

// A publication is a broadcast of 8 bytes from each of two ranks.
TEST(Execute, TakesAsLongAsMessagesSay) {
  const Programs programs = steps_on(1, 2);
  const Execution execution = run(programs);
  int num_publications = 0;
  for (const SimulatedSpan& span : execution.timeline.front()) {
    if (!programs.front().issue(span.issue).is(Kind::kPublishIntra)) continue;
    EXPECT_GE(span.end_us - span.start_us, 2 * 8 * kByteUs);
    ++num_publications;
  }
  EXPECT_GT(num_publications, 0);
}

// Whatever is waited for has ended before.
TEST(Execute, StartsNothingBeforeWhatItWaitsFor) {
  const Programs programs = steps_on(2, 2);
  const Execution execution = run(programs);
  EXPECT_EQ(execution.violations, std::vector<std::string>{});
  for (const core::Owner rank : programs.indices()) {
    const std::vector<Frontier> waits = waits_on(programs[rank]);
    ASSERT_EQ(execution.timeline[rank].size(), waits.size());
    std::vector<double> end_us(waits.size());
    for (const SimulatedSpan& span : execution.timeline[rank])
      end_us[static_cast<std::size_t>(span.issue)] = span.end_us;
    for (const SimulatedSpan& span : execution.timeline[rank]) {
      for (const int earlier : waits[static_cast<std::size_t>(span.issue)]) {
        if (earlier < 0) continue;
        EXPECT_GE(span.start_us, end_us[static_cast<std::size_t>(earlier)]);
      }
    }
  }
}

TEST(Execute, SaysWhatWaitsForEver) {
  Programs programs = steps_on(1, 2);
  Program& other = programs[core::Owner(1)];
  other.issues.resize(3);
  const Execution execution = run(programs);
  ASSERT_FALSE(execution.violations.empty());
  EXPECT_NE(execution.violations.front().find("waits forever"), std::string::npos)
      << execution.violations.front();
}

// Counts, and nothing else: what it sees is in an order that programs allow.
class Counter : public Witness {
 public:
  void start(core::Owner, int) override { ++started; }
  void contribute(core::Owner, int, MessageId) override { ++contributed; }
  void receive(core::Owner, int, MessageId) override {
    EXPECT_GT(contributed, 0);
    ++received;
  }
  void finish(core::Owner, int) override {
    ++finished;
    EXPECT_LE(finished, started);
  }
  int started = 0, contributed = 0, received = 0, finished = 0;
};

TEST(Execute, ShowsAWitnessEveryOperationAndMessage) {
  const Programs programs = steps_on(1, 2, 1);
  Counter counter;
  run(programs, &counter);
  int num_issues = 0, num_publications = 0, num_routes = 0;
  for (const Program& program : programs) {
    num_issues += program.num_issues();
    for (const Issue& issue : program.issues) {
      num_publications += issue.is(Kind::kPublishIntra) ? 1 : 0;
      num_routes += issue.is(Kind::kRouteIntra) ? 1 : 0;
    }
  }
  EXPECT_EQ(counter.started, num_issues);
  EXPECT_EQ(counter.finished, num_issues);
  // Each is a message a root: a broadcast comes from its root to two, a reduction from two to one.
  EXPECT_EQ(counter.contributed, num_publications + 2 * num_routes);
  EXPECT_EQ(counter.received, 2 * num_publications + num_routes);
}

TEST(Execute, RefusesProgramsOfAnotherMesh) {
  const Programs programs = steps_on(1, 2);
  EXPECT_THROW(run({programs.front()}), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::simulate
