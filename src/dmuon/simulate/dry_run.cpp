#include "dmuon/simulate/dry_run.h"

#include <algorithm>

#include "dmuon/core/error.h"
#include "dmuon/simulate/machine.h"
#include "dmuon/simulate/rank_analysis.h"

namespace dmuon::simulate {
namespace {

bool communicates(const Issue& issue) {
  return schedule::lane_of(issue.operation.kind) != schedule::Lane::kCompute;
}

// The order of the first rank is every rank's.
void check_order(const Program& first, const Program& other, core::Slot slot,
                 std::vector<std::string>* violations) {
  auto own = other.issues.begin();
  auto model = first.issues.begin();
  while (true) {
    own = std::find_if(own, other.issues.end(), communicates);
    model = std::find_if(model, first.issues.end(), communicates);
    const bool ends = own == other.issues.end();
    if (ends && model == first.issues.end()) break;
    if (ends || model == first.issues.end() || own->operation.kind != model->operation.kind ||
        own->operation.unit != model->operation.unit || own->version() != model->version()) {
      violations->push_back(
          core::message("slot ", slot, ": ", ends ? "nothing" : describe(own->operation),
                        " is issued where slot 0 issues ",
                        model == first.issues.end() ? "nothing" : describe(model->operation)));
      break;
    }
    ++own;
    ++model;
  }
  if (other.comparisons != first.comparisons)
    violations->push_back(
        core::message("slot ", slot, ": compares something else than slot 0, or elsewhere"));
  if (other.hash != first.hash)
    violations->push_back(core::message("slot ", slot, ": has another hash than slot 0"));
}

}  // namespace

DryRun dry_run(const Programs& programs, bool node_copy, std::int64_t granted_bytes,
               const Delays& delays) {
  core::require(!programs.empty() && programs.size() == programs.front().layout->num_slots(),
                "dry_run: programs: expected one a slot, got ", programs.size());
  DryRun run;
  core::Vector<core::Slot, RankAnalysis> analyses;
  for (const core::Slot slot : programs.indices()) {
    check_order(programs.front(), programs[slot], slot, &run.violations);
    analyses.push_back(analyze(programs[slot], slot, node_copy, &run.violations));
    run.peak_bytes = std::max(run.peak_bytes, analyses.back().peak_bytes);
    if (analyses.back().peak_bytes > granted_bytes)
      run.violations.push_back(core::message("slot ", slot, ": takes ", analyses.back().peak_bytes,
                                             " bytes, granted are ", granted_bytes));
  }
  execute(programs, analyses, node_copy, delays, &run);
  return run;
}

DryRun dry_run(const Job& job, const Delays& delays) {
  return dry_run(unroll(job), job.options.node_copy, granted_bytes(job), delays);
}

}  // namespace dmuon::simulate
