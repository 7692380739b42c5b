#include "dmuon/simulate/program.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::simulate {
namespace {

constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

using schedule::Kind;
using schedule::Moment;
using schedule::Operation;
using schedule::Pass;
using schedule::PassSchedule;
using schedule::Trace;
using schedule::Trigger;
using What = Event::What;

bool is_backward(What what) { return what == What::kBackward || what == What::kBackwardNoSync; }

const Trace& trace_of(const Job& job, What what) {
  if (what == What::kEvaluation) return job.evaluation;
  return is_backward(what) ? job.backward : job.forward;
}

std::size_t num_replayed(const Event& event, const Trace& trace) {
  return event.replayed < 0 ? trace.size()
                            : std::min(trace.size(), static_cast<std::size_t>(event.replayed));
}

// A pass that follows no trace frees a unit whose reshard the replay leaves out.
std::vector<int> units_left_open(const Trace& trace) {
  std::vector<int> open;
  for (const Trigger& trigger : trace) {
    std::erase(open, trigger.unit);
    if (trigger.moment == Moment::kBeforeUse) open.push_back(trigger.unit);
  }
  return {open.rbegin(), open.rend()};
}

// The triggers of a pass that are served on demand.
Trace on_demand_part(const Job& job, const Event& event) {
  const Trace& trace = trace_of(job, event.what);
  const std::size_t replayed = num_replayed(event, trace);
  Trace rest(trace.begin() + static_cast<std::ptrdiff_t>(replayed), trace.end());
  if (event.what == What::kTrainForward && job.reshard_after_forward && replayed < trace.size()) {
    for (const int unit : units_left_open(trace)) rest.push_back({Moment::kAfterForward, unit});
  }
  return rest;
}

/// The events, one after the other, as every rank issues them if it skips nothing; kUpdate has its
/// place but not its batches.
class Unroller {
 public:
  explicit Unroller(const Job& job)
      : job_(job),
        schedule_(
            schedule::build_step_schedule(job.layout, job.forward, job.backward, {}, job.options)),
        evaluation_(schedule::build_pass_schedule(job.layout, job.evaluation, job.forward,
                                                  Pass::kEvalForward, job.options)) {}

  Program run(int slot) {
    program_ = {};
    step_ = 0;
    skipped_.assign(job_.events.size() * job_.layout.units.size(), false);
    for (const Skip& skip : job_.skips) {
      if (skip.slot == slot) skipped_.at(index(skip.event, skip.unit)) = true;
    }
    program_.batches = job_.batches.at(static_cast<std::size_t>(slot));
    for (std::size_t event = 0; event < job_.events.size(); ++event) {
      event_ = static_cast<int>(event);
      what_ = job_.events[event].what;
      if (what_ == What::kStep) {
        issue_all(schedule::build_update_schedule(job_.layout, job_.forward, program_.batches,
                                                  job_.options));
        ++step_;
      } else {
        run_pass(job_.events[event]);
      }
    }
    return std::move(program_);
  }

 private:
  std::size_t index(int event, int unit) const {
    core::require(event >= 0 && unit >= 0 && unit < static_cast<int>(job_.layout.units.size()),
                  "unroll: skips: expected an event and a unit of the job, got event ", event,
                  " and unit ", unit);
    return static_cast<std::size_t>(event) * job_.layout.units.size() +
           static_cast<std::size_t>(unit);
  }

  const PassSchedule& schedule_of(What what) const {
    if (what == What::kTrainForward) return schedule_.forward;
    if (what == What::kEvaluation) return evaluation_;
    return what == What::kBackward ? schedule_.backward : schedule_.backward_no_sync;
  }

  void run_pass(const Event& event) {
    const PassSchedule& pass = schedule_of(event.what);
    const Trace& trace = trace_of(job_, event.what);
    const std::size_t replayed = num_replayed(event, trace);
    for (std::size_t i = 0; i < replayed; ++i) issue_all(pass.at[i]);
    if (replayed == trace.size()) {
      issue_all(pass.end);
      return;
    }
    finish_routes(pass, replayed);
    for (const Trigger& trigger : on_demand_part(job_, event)) serve(trigger);
  }

  // A unit's gradients must be free before it is used on demand.
  void finish_routes(const PassSchedule& pass, std::size_t replayed) {
    std::set<int> in_flight;
    for (std::size_t i = 0; i < replayed; ++i) {
      for (const Operation& operation : pass.at[i]) {
        if (operation.kind == Kind::kRouteIntra) in_flight.insert(operation.unit);
      }
    }
    const auto finish = [&](const std::vector<Operation>& operations, bool issued) {
      for (const Operation& operation : operations) {
        if (operation.kind != Kind::kFinishRoute) continue;
        if (in_flight.erase(operation.unit) > 0 && !issued) issue(operation);
      }
    };
    for (std::size_t i = 0; i < pass.at.size(); ++i) finish(pass.at[i], i < replayed);
    finish(pass.end, false);
  }

  void serve(const Trigger& trigger) {
    const bool backward = is_backward(what_);
    if (trigger.moment == Moment::kAfterBackward) issue({Kind::kBackward, trigger.unit, 0, {}});
    issue_all(schedule::serve_on_demand(job_.layout, trigger, what_ != What::kBackwardNoSync));
    if (trigger.moment == Moment::kBeforeUse && !backward)
      issue({Kind::kForward, trigger.unit, 0, {}});
  }

  void issue_all(const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) issue(operation);
  }

  void issue(const Operation& operation) {
    const bool uses = operation.kind == Kind::kForward || operation.kind == Kind::kBackward;
    if (uses && skipped_[index(event_, operation.unit)]) return;
    program_.issues.push_back({operation, step_, is_backward(what_)});
  }

  const Job& job_;
  schedule::StepSchedule schedule_;
  PassSchedule evaluation_;
  Program program_;
  std::vector<bool> skipped_;  // [events][units]
  int event_ = 0;
  What what_ = What::kStep;
  int step_ = 0;
};

// Units in use, through one pass; the most there were.
std::size_t most_open(const Job& job, const Event& event, std::set<int>* open) {
  const Trace& trace = trace_of(job, event.what);
  const std::size_t replayed = num_replayed(event, trace);
  Trace crossed(trace.begin(), trace.begin() + static_cast<std::ptrdiff_t>(replayed));
  const Trace rest = on_demand_part(job, event);
  crossed.insert(crossed.end(), rest.begin(), rest.end());
  std::size_t most = open->size();
  for (std::size_t i = 0; i < crossed.size(); ++i) {
    const bool again =
        std::find(crossed.begin() + static_cast<std::ptrdiff_t>(i) + 1, crossed.end(),
                  Trigger{Moment::kAfterBackward, crossed[i].unit}) != crossed.end();
    if (crossed[i].moment == Moment::kBeforeUse) {
      open->insert(crossed[i].unit);
    } else if (!again) {
      open->erase(crossed[i].unit);
    }
    most = std::max(most, open->size());
  }
  return most;
}

}  // namespace

std::vector<Program> unroll(const Job& job) {
  const int num_slots = job.layout.num_slots();
  core::require(static_cast<int>(job.batches.size()) == num_slots,
                "unroll: batches: expected those of ", num_slots, " slots, got ",
                job.batches.size());
  for (const Skip& skip : job.skips) {
    core::require(
        skip.slot >= 0 && skip.slot < num_slots && skip.event < static_cast<int>(job.events.size()),
        "unroll: skips: expected a slot below ", num_slots, " and an event below ",
        job.events.size(), ", got slot ", skip.slot, " and event ", skip.event);
  }
  const auto layout = std::make_shared<const schedule::Layout>(job.layout);
  Unroller unroller(job);
  std::vector<Program> programs;
  for (int slot = 0; slot < num_slots; ++slot) {
    programs.push_back(unroller.run(slot));
    programs.back().layout = layout;
  }
  return programs;
}

std::int64_t granted_bytes(const Job& job) {
  if (!job.reshard_after_forward) return kUnbounded;
  std::set<int> open;
  std::size_t most = 1;
  for (const Event& event : job.events) {
    if (event.what == What::kStep) {
      open.clear();
      continue;
    }
    const std::size_t replayed = num_replayed(event, trace_of(job, event.what));
    if (replayed > 0 && replayed < trace_of(job, event.what).size()) return kUnbounded;
    most = std::max(most, most_open(job, event, &open));
  }
  std::int64_t weights = 0;
  std::int64_t gradients = 0;
  for (const schedule::UnitLayout& unit : job.layout.units) {
    weights = std::max(weights, unit.num_elements() * unit.weight_size);
    gradients = std::max(gradients, unit.num_elements() * unit.gradient_size);
  }
  const auto units = static_cast<std::int64_t>(most) + job.options.units_in_flight() - 1;
  return units * (weights + gradients);
}

std::string describe(const Operation& operation) {
  return core::message(schedule::name_of(operation.kind),
                       operation.kind == Kind::kUpdate ? " of batch " : " of unit ",
                       operation.unit);
}

}  // namespace dmuon::simulate
