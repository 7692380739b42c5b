#include "dmuon/simulate/program.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/schedule/resolver.h"

namespace dmuon::simulate {
namespace {

constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

using core::UnitIndex;
using schedule::Kind;
using schedule::Moment;
using schedule::Operation;
using schedule::Pass;
using schedule::Trace;
using schedule::Trigger;
using What = Event::What;

Pass pass_of(What what) {
  if (what == What::kEvaluation) return Pass::kEvalForward;
  return is_backward(what) ? Pass::kBackward : Pass::kTrainForward;
}

const Trace& uses_of(const Job& job, const Event& event) {
  if (!event.instead.empty()) return event.instead;
  if (event.what == What::kEvaluation) return job.evaluation;
  return is_backward(event.what) ? job.backward : job.forward;
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

  const Event& now() const { return job_.events[static_cast<std::size_t>(event_)]; }
  bool skips(UnitIndex unit) const {
    return skipped_[static_cast<std::size_t>(event_)].contains(unit);
  }

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
    const auto backward = std::find_if(later, job_.events.end(), [](const Event& event) {
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
        if (!skips(trigger.unit)) resolver_.before_gradient(trigger.unit);
        compute(Kind::kBackward, trigger);
        return resolver_.after_backward(trigger.unit);
    }
  }

  void compute(Kind kind, const Trigger& trigger) {
    if (skips(trigger.unit)) return;
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

}  // namespace

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

std::int64_t granted_bytes(const Job& job) {
  if (!job.options.reshard_after_forward) return kUnbounded;
  std::set<UnitIndex> open;
  bool waits =
      false;  // what the last step sent ahead, the forward's first unit, was not used since
  std::size_t most = 1;
  bool traced = false;
  for (const Event& event : job.events) {
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
  const auto units = static_cast<std::int64_t>(most) + job.options.units_in_flight() - 1;
  return units * (job.layout.largest_weights() + job.layout.largest_gradients());
}

std::string describe(const Operation& operation) {
  const bool updates = operation.kind == Kind::kUpdate;
  return core::message(schedule::name_of(operation.kind), updates ? " of batch " : " of unit ",
                       updates ? operation.batch.value() : operation.unit.value());
}

}  // namespace dmuon::simulate
