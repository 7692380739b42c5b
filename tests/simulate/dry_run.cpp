#include "tests/simulate/dry_run.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/schedule/resolver.h"
#include "tests/simulate/data.h"
#include "tests/simulate/rank_analysis.h"

namespace dmuon::simulate {
namespace {

using core::UnitIndex;
using schedule::Moment;
using schedule::Trace;
using schedule::Trigger;
using What = TrainingEvent::What;

constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

bool communicates(const Issue& issue) { return issue.carries_messages(); }

// The order of the first rank is every rank's.
void check_order(const Program& first, const Program& other, core::Owner rank,
                 std::vector<std::string>* violations) {
  auto own = other.issues.begin();
  auto model = first.issues.begin();
  while (true) {
    own = std::find_if(own, other.issues.end(), communicates);
    model = std::find_if(model, first.issues.end(), communicates);
    const bool ends = own == other.issues.end();
    if (ends && model == first.issues.end()) break;
    if (ends || model == first.issues.end() || own->operation.kind != model->operation.kind ||
        own->unit() != model->unit() || own->version() != model->version()) {
      violations->push_back(core::message(
          "rank ", rank, ": ", ends ? "nothing" : describe(*own), " is issued where rank 0 issues ",
          model == first.issues.end() ? "nothing" : describe(*model)));
      break;
    }
    ++own;
    ++model;
  }
  if (other.comparisons != first.comparisons)
    violations->push_back(
        core::message("rank ", rank, ": compares something else than rank 0, or elsewhere"));
  if (other.leaves != first.leaves)
    violations->push_back(
        core::message("rank ", rank, ": leaves to the host framework where rank 0 does not"));
  if (other.hash != first.hash)
    violations->push_back(core::message("rank ", rank, ": has another hash than rank 0"));
}

// Units in use, through one pass; the most there were.
std::size_t most_open(const Trace& uses, bool keeps_last, std::set<UnitIndex>* open) {
  std::size_t most = open->size();
  for (auto trigger = uses.begin(); trigger != uses.end(); ++trigger) {
    const bool again = std::find(trigger + 1, uses.end(),
                                 Trigger{Moment::kAfterBackward, trigger->unit}) != uses.end();
    if (trigger->moment == Moment::kBeforeUse) {
      open->insert(trigger->unit);
    } else if (!again && !(keeps_last && trigger + 1 == uses.end())) {
      open->erase(trigger->unit);
    }
    most = std::max(most, open->size());
  }
  return most;
}

std::int64_t largest_node_mean(const schedule::Layout& layout) {
  std::int64_t largest = 0;
  for (const schedule::UnitLayout& unit : layout.units) {
    for (const core::Shard column : layout.shards())
      largest = std::max(largest, layout.node_mean(unit, column));
  }
  return largest;
}

class Drawn : public Durations {
 public:
  explicit Drawn(const Delays& delays) : delays_(delays), random_(delays.seed) {}

  double work_us(core::Owner, const Issue&) override { return draw(delays_.compute_us); }
  double message_us(core::Owner, const Issue&, const schedule::Message&) override {
    return draw(delays_.message_us);
  }
  bool rendezvous() const override { return delays_.rendezvous; }

 private:
  double draw(double mean_us) {
    return static_cast<double>(random_()) / static_cast<double>(std::minstd_rand::max()) * 2 *
           mean_us;
  }

  const Delays& delays_;
  std::minstd_rand random_;
};

}  // namespace

std::int64_t granted_bytes(const Job& job) {
  if (!job.options.reshard_after_forward) return kUnbounded;
  std::set<UnitIndex> open;
  bool waits =
      false;  // what the last step sent ahead, the forward's first unit, was not used since
  std::size_t most = 1;
  bool traced = false;
  for (const TrainingEvent& event : job.events) {
    if (event.what == What::kStep) {
      open.clear();
      waits = traced && job.options.lookahead > 0;
      continue;
    }
    if (!event.instead.empty()) return kUnbounded;
    const Trace& uses = uses_of(job, event);
    const bool trains = event.what == What::kTrainForward;
    const auto is_first = [&](const Trigger& trigger) {
      return trigger.unit == job.forward.front().unit;
    };
    const bool beside = waits && !(!uses.empty() && is_first(uses.front()));
    most = std::max(most, most_open(uses, trains && traced, &open) + (beside ? 1 : 0));
    waits = waits && std::none_of(uses.begin(), uses.end(), is_first);
    traced |= trains;
    if (is_backward(event.what)) open.clear();  // it releases what is left
  }
  // A pass without a trace keeps so many units that were read; their last ones stay for a backward.
  const int kept = job.read.empty() ? 0 : schedule::kMostRead;
  const auto units = static_cast<std::int64_t>(most) + job.options.units_in_flight() - 1 + kept;
  return units * (job.layout.largest_weights() + job.layout.largest_gradients()) +
         (job.layout.has_inter() ? 4 * largest_node_mean(job.layout) : 0);
}

DryRun dry_run(const Programs& programs, bool node_copy, std::int64_t granted_bytes,
               const Delays& delays) {
  DryRun run;
  for (const core::Owner rank : programs.indices()) {
    check_order(programs.front(), programs[rank], rank, &run.violations);
    const RankAnalysis analysis = analyze(programs[rank], rank, node_copy, &run.violations);
    run.peak_bytes = std::max(run.peak_bytes, analysis.peak_bytes);
    if (analysis.peak_bytes > granted_bytes)
      run.violations.push_back(core::message("rank ", rank, ": takes ", analysis.peak_bytes,
                                             " bytes, granted are ", granted_bytes));
  }
  Data data(programs, node_copy, &run.violations);
  Drawn durations(delays);
  Execution execution = execute(programs, durations, &data);
  run.timeline = std::move(execution.timeline);
  run.violations.insert(run.violations.end(), execution.violations.begin(),
                        execution.violations.end());
  return run;
}

DryRun dry_run(const Job& job, const Delays& delays) {
  return dry_run(unroll(job), job.options.node_copy, granted_bytes(job), delays);
}

}  // namespace dmuon::simulate
