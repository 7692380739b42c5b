#include "dmuon/simulate/program.h"

#include <algorithm>
#include <set>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/schedule/resolver.h"

namespace dmuon::simulate {
namespace {

using core::UnitIndex;
using schedule::Kind;
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
    program_.hash = resolver_.hash();
    return std::move(program_);
  }

 private:
  void leave_to_host(const std::optional<Trigger>& trigger) override {
    program_.leaves.push_back({num_messages_, trigger});
  }

  void compare(const std::optional<Trigger>& trigger) override {
    program_.comparisons.push_back({num_messages_, trigger});
  }

  void perform(const Operation& operation) override {
    num_messages_ += schedule::lane_of(operation.kind) == schedule::Lane::kCompute ? 0 : 1;
    issue(operation, resolver_.crossing());
  }

  void issue(const Operation& operation, const std::optional<schedule::Crossing>& crossing) {
    program_.issues.push_back({operation, event_, step_, crossing});
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
    switch (trigger.moment) {
      case Moment::kBeforeUse:
        if (backward) return resolver_.before_backward(trigger.unit);
        resolver_.before_use(trigger.unit);
        return compute(Kind::kForward, trigger);
      case Moment::kAfterForward:
        return resolver_.after_forward(trigger.unit);
      case Moment::kAfterBackward:
        if (computes(trigger.unit)) resolver_.before_gradient(trigger.unit);
        compute(Kind::kBackward, trigger);
        return resolver_.after_backward(trigger.unit);
    }
  }

  void compute(Kind kind, const Trigger& trigger) {
    if (!computes(trigger.unit)) return;
    issue({.kind = kind, .unit = trigger.unit},
          schedule::Crossing{trigger, pass_of(now().what), /*position=*/-1});
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
    programs.push_back(Rank(job, slot).run());
    programs.back().layout = layout;
  }
  return programs;
}

std::vector<Frontier> waits_on(const Program& program) {
  constexpr auto kCompute = static_cast<std::size_t>(schedule::Lane::kCompute);
  const Frontier nothing{-1, -1, -1};
  std::vector<Frontier> all;
  Frontier newest_on_lane = nothing;
  core::Vector<core::UnitIndex, std::array<int, schedule::kNumKinds>> newest;
  newest.resize(program.layout->units.size());
  for (auto& kinds : newest) kinds.fill(-1);
  for (int index = 0; index < program.num_issues(); ++index) {
    const schedule::Operation& operation = program.issue(index).operation;
    const auto lane = static_cast<std::size_t>(schedule::lane_of(operation.kind));
    Frontier& waits = all.emplace_back(nothing);
    waits[lane] = newest_on_lane[lane];
    waits[kCompute] = newest_on_lane[kCompute];
    for (const schedule::Dependency& dependency : operation.after) {
      const auto of = static_cast<std::size_t>(schedule::lane_of(dependency.kind));
      const auto kind = static_cast<std::size_t>(dependency.kind);
      waits[of] = std::max(waits[of], newest.at(dependency.unit)[kind]);
    }
    newest_on_lane[lane] = index;
    if (operation.kind != Kind::kUpdate)
      newest.at(operation.unit)[static_cast<std::size_t>(operation.kind)] = index;
  }
  return all;
}

std::string describe(const Operation& operation) {
  const bool updates = operation.kind == Kind::kUpdate;
  return core::message(schedule::name_of(operation.kind), updates ? " of batch " : " of unit ",
                       updates ? operation.batch.value() : operation.unit.value());
}

}  // namespace dmuon::simulate
