#include "dmuon/simulate/program.h"

#include <algorithm>
#include <set>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/schedule/resolver.h"

namespace dmuon::simulate {
namespace {

using core::UnitIndex;
using schedule::Lane;
using schedule::Moment;
using schedule::Operation;
using schedule::Pass;
using schedule::Trace;
using schedule::Trigger;
using What = TrainingEvent::What;

Pass pass_of(What what) {
  if (what == What::kEvaluation) return Pass::kEvalForward;
  return is_backward(what) ? Pass::kBackward : Pass::kTrainForward;
}

/// One rank's program: hooks on one side of a resolver, a list on the other.
class Rank : private schedule::Performer {
 public:
  Rank(const Job& job, core::Slot slot)
      : job_(job),
        skipped_(job.events.size()),
        resolver_(job.layout, job.options, job.batches.at(slot), this) {
    program_.batches = job.batches.at(slot);
    for (const Skip& skip : job.skips) {
      if (skip.slot == slot) skipped_[static_cast<std::size_t>(skip.event)].insert(skip.unit);
    }
  }

  Program run() {
    for (event_ = 0; event_ < static_cast<int>(job_.events.size()); ++event_) {
      if (now().what != What::kStep) {
        run_pass();
        continue;
      }
      resolver_.settle_step();
      resolver_.step();
      ++step_;
    }
    --event_;
    resolver_.settle();
    resolver_.finish_update();
    program_.hash = resolver_.hash();
    return std::move(program_);
  }

 private:
  void leave_to_host(const std::optional<Trigger>& trigger) override {
    program_.leaves.push_back({num_messages_, trigger});
  }
  void leave_before_forward() override { leave_to_host(std::nullopt); }

  void compare(const std::optional<Trigger>& trigger) override {
    program_.comparisons.push_back({num_messages_, trigger});
  }

  void perform(const Operation& operation) override {
    program_.issues.push_back(
        {.operation = operation, .event = event_, .step = step_, .crossing = resolver_.crossing()});
    num_messages_ += program_.issues.back().carries_messages() ? 1 : 0;
  }

  const TrainingEvent& now() const { return job_.events[static_cast<std::size_t>(event_)]; }
  bool skips(UnitIndex unit) const {
    return skipped_[static_cast<std::size_t>(event_)].contains(unit);
  }
  // A unit that is empty has nothing to read and no gradient.
  bool computes(UnitIndex unit) const { return !skips(unit) && !job_.layout.units[unit].empty(); }

  void run_pass() {
    const Trace& uses = uses_of(job_, now());
    const Pass pass = pass_of(now().what);
    Trace& traced = traced_[static_cast<int>(pass)];
    const bool known = !resolver_.order().trace(pass).empty() && traced == uses;
    if (known && leaves_out_backward(uses)) return;
    begin(pass);
    if (resolver_.order().on_demand()) traced = uses;
    for (const Trigger& trigger : uses) {
      if (!known || !skips(trigger.unit)) use(trigger);
    }
    if (pass == Pass::kBackward) resolver_.end_backward();
  }

  // In an earlier micro-step every rank must run its backward.
  bool leaves_out_backward(const Trace& uses) const {
    const auto next = static_cast<std::size_t>(event_) + 1;
    return now().what == What::kBackward && resolver_.owes_backward() &&
           next < job_.events.size() && job_.events[next].what == What::kStep &&
           std::all_of(uses.begin(), uses.end(),
                       [&](const Trigger& trigger) { return skips(trigger.unit); });
  }

  void begin(Pass pass) {
    if (pass == Pass::kBackward) {
      resolver_.set_sync(now().what == What::kBackward);
      return resolver_.begin_backward();
    }
    // As a loop over micro-steps does it, a forward has the sync of the backward that follows.
    const auto later = job_.events.begin() + event_;
    const auto backward = std::find_if(later, job_.events.end(), [](const TrainingEvent& event) {
      return is_backward(event.what) || event.what == What::kStep;
    });
    resolver_.set_sync(backward == job_.events.end() || backward->what != What::kBackwardNoSync);
    resolver_.begin_forward(pass == Pass::kTrainForward);
  }

  void use(const Trigger& trigger) {
    const bool backward = is_backward(now().what);
    const bool reader = job_.read.contains(trigger.unit);
    switch (trigger.moment) {
      case Moment::kBeforeUse:
        if (backward) return resolver_.before_backward(trigger.unit, reader);
        resolver_.before_use(trigger.unit, reader);
        return compute(Compute::kForward, trigger);
      case Moment::kAfterForward:
        return reader ? resolver_.after_read(trigger) : resolver_.after_forward(trigger.unit);
      case Moment::kAfterBackward:
        if (computes(trigger.unit)) resolver_.before_gradient(trigger.unit);
        compute(Compute::kBackward, trigger);
        return reader ? resolver_.after_read(trigger) : resolver_.after_backward(trigger.unit);
    }
  }

  void compute(Compute what, const Trigger& trigger) {
    if (!computes(trigger.unit)) return;
    program_.issues.push_back(
        {.compute = what,
         .operation = {.subject = trigger.unit},
         .event = event_,
         .step = step_,
         .crossing = schedule::Crossing{trigger, pass_of(now().what), /*position=*/-1}});
  }

  const Job& job_;
  std::vector<std::set<UnitIndex>> skipped_;  // [events]
  schedule::Resolver resolver_;
  Program program_;
  Trace traced_[3];  // [passes] the uses of which the resolver's trace was made
  int event_ = 0;
  int step_ = 0;
  int num_messages_ = 0;
};

}  // namespace

const Trace& uses_of(const Job& job, const TrainingEvent& event) {
  if (!event.instead.empty()) return event.instead;
  if (event.what == What::kEvaluation) return job.evaluation;
  return is_backward(event.what) ? job.backward : job.forward;
}

Programs unroll(const Job& job) {
  const int num_slots = job.layout.num_slots();
  core::require(job.batches.size() == num_slots, "unroll: batches: expected those of ", num_slots,
                " slots, got ", job.batches.size());
  for (const Skip& skip : job.skips) {
    core::require(job.batches.contains(skip.slot) && skip.event >= 0 &&
                      skip.event < static_cast<int>(job.events.size()) &&
                      job.layout.units.contains(skip.unit),
                  "unroll: skips: expected a slot below ", num_slots, ", an event below ",
                  job.events.size(), " and a unit below ", job.layout.units.size(), ", got slot ",
                  skip.slot, ", event ", skip.event, " and unit ", skip.unit);
  }
  const auto layout = std::make_shared<const schedule::Layout>(job.layout);
  Programs programs;
  for (const core::Slot slot : job.batches.indices()) {
    Program program = Rank(job, slot).run();
    program.layout = layout;
    for (int rank = 0; rank < layout->tensor_parallel; ++rank) programs.push_back(program);
  }
  return programs;
}

Newest::Newest(const Program& program) {
  schedule::PerKind<int> none{};
  for (int& index : none) index = -1;
  units_.resize(program.layout->units.size(), none);
  batches_.resize(program.batches.size(), none);
}

int Newest::of(const schedule::Dependency& named) const {
  return kinds(*this, named.subject)[named.kind];
}

void Newest::set(const Operation& operation, int index) {
  kinds(*this, operation.subject)[operation.kind] = index;
}

std::vector<Frontier> waits_on(const Program& program) {
  std::vector<Frontier> all;
  Frontier newest_on_lane = kNothing;
  Newest newest(program);
  for (int index = 0; index < program.num_issues(); ++index) {
    const Issue& issue = program.issue(index);
    const Lane lane = issue.lane();
    Frontier waits = kNothing;
    const int last = newest_on_lane[lane];
    if (!schedule::carries_messages(lane)) {
      waits[lane] = last;
    } else if (last >= 0) {  // which has begun, but may not be done
      waits = all[static_cast<std::size_t>(last)];
    }
    waits[Lane::kCompute] = newest_on_lane[Lane::kCompute];
    for (const schedule::Dependency& dependency : issue.operation.after) {
      int& of = waits[schedule::lane_of(dependency.kind)];
      of = std::max(of, newest.of(dependency));
    }
    all.push_back(waits);
    newest_on_lane[lane] = index;
    if (!issue.compute) newest.set(issue.operation, index);
  }
  return all;
}

std::string describe(const Issue& issue) {
  if (!issue.compute) return schedule::describe(issue.operation.kind, issue.operation.subject);
  return (issue.is(Compute::kForward) ? "forward of " : "backward of ") +
         schedule::describe(issue.operation.subject);
}

}  // namespace dmuon::simulate
