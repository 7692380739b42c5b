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
void check_order(const std::vector<Program>& programs, std::vector<std::string>* violations) {
  for (std::size_t slot = 1; slot < programs.size(); ++slot) {
    auto own = programs[slot].issues.begin();
    auto first = programs[0].issues.begin();
    while (true) {
      own = std::find_if(own, programs[slot].issues.end(), communicates);
      first = std::find_if(first, programs[0].issues.end(), communicates);
      const bool ends = own == programs[slot].issues.end();
      if (ends && first == programs[0].issues.end()) break;
      if (ends || first == programs[0].issues.end() ||
          own->operation.kind != first->operation.kind ||
          own->operation.unit != first->operation.unit || own->version() != first->version()) {
        violations->push_back(core::message(
            "slot ", slot, ": ", ends ? "nothing" : describe(own->operation),
            " is issued where slot 0 issues ",
            first == programs[0].issues.end() ? "nothing" : describe(first->operation)));
        break;
      }
      ++own;
      ++first;
    }
  }
}

}  // namespace

DryRun dry_run(const std::vector<Program>& programs, bool node_copy, std::int64_t granted_bytes,
               const Delays& delays) {
  core::require(!programs.empty() &&
                    static_cast<int>(programs.size()) == programs.front().layout->num_slots(),
                "dry_run: programs: expected one a slot, got ", programs.size());
  DryRun run;
  check_order(programs, &run.violations);
  std::vector<RankAnalysis> analyses;
  for (std::size_t slot = 0; slot < programs.size(); ++slot) {
    analyses.push_back(analyze(programs[slot], static_cast<int>(slot), node_copy, &run.violations));
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
