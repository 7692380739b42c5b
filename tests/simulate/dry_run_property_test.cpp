// Over random meshes, layouts, traces, options and histories: every schedule is sound.

#include <gtest/gtest.h>

#include <algorithm>

#include "dmuon/core/error.h"
#include "tests/simulate/dry_run.h"
#include "tests/simulate/random_job.h"
#include "tests/simulate/shrink.h"

namespace dmuon::simulate {
namespace {

constexpr int kUsualSchedules = 400;

std::string text_of(const std::vector<std::string>& violations) {
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(violations.size(), 5); ++i)
    text += "  " + violations[i] + "\n";
  return text;
}

TEST(DryRun, FindsEveryScheduleSound) {
  for (int seed = 0; seed < num_schedules(kUsualSchedules); ++seed) {
    Random random(static_cast<unsigned>(seed));
    const Job job = draw_job(&random);
    const Delays delays{.seed = static_cast<std::uint32_t>(random()),
                        .rendezvous = draw_one_in(&random, 2)};
    const auto fails = [&](const Job& candidate) {
      return !dry_run(candidate, delays).violations.empty();
    };
    if (!fails(job)) continue;
    const Job small = shrink(job, fails);
    FAIL() << "seed " << seed << ":\n" << small << text_of(dry_run(small, delays).violations);
  }
}

}  // namespace
}  // namespace dmuon::simulate
