// The dry run is only as good as what it finds: every unsound change must be found, and by the
// check that is meant for it.

#include <gtest/gtest.h>

#include "tests/simulate/dry_run.h"
#include "tests/simulate/mutations.h"

namespace dmuon::simulate {
namespace {

constexpr int kUsualSchedules = 80;

bool contains(const std::vector<std::string>& violations, const char* finding) {
  for (const std::string& violation : violations) {
    if (violation.find(finding) != std::string::npos) return true;
  }
  return false;
}

class Mutation : public testing::TestWithParam<std::size_t> {};

TEST_P(Mutation, IsAlwaysFound) {
  const Mutator& mutator = mutators()[GetParam()];
  int num_mutants = 0;
  for (int seed = 0; seed < num_schedules(kUsualSchedules); ++seed) {
    Random random(static_cast<unsigned>(seed));
    const Job job = draw_job(&random);
    Programs programs = unroll(job);
    if (!mutator.apply(&random, job, &programs)) continue;
    ++num_mutants;
    const DryRun run = dry_run(programs, job.options.node_copy, granted_bytes(job), {.seed = 1});
    ASSERT_FALSE(run.violations.empty()) << mutator.name << ", seed " << seed << ":\n" << job;
    ASSERT_TRUE(contains(run.violations, mutator.finding))
        << mutator.name << ", seed " << seed << ": " << testing::PrintToString(run.violations)
        << '\n'
        << job;
  }
  RecordProperty("mutants", num_mutants);
  // Some need what few schedules have, as a unit that was sent ahead and is not used.
  EXPECT_GT(num_mutants, num_schedules(kUsualSchedules) / 40) << mutator.name;
}

INSTANTIATE_TEST_SUITE_P(Mutators, Mutation, testing::Range(std::size_t{0}, mutators().size()),
                         [](const testing::TestParamInfo<std::size_t>& tested) {
                           std::string name = mutators()[tested.param].name;
                           for (char& letter : name) letter = letter == ' ' ? '_' : letter;
                           return name;
                         });

}  // namespace
}  // namespace dmuon::simulate
