#include "tests/simulate/random_job.h"

#include <algorithm>
#include <set>

#include "dmuon/schedule/order.h"

namespace dmuon::simulate {
namespace {

using schedule::Moment;
using schedule::Trace;
using schedule::Trigger;
using What = Event::What;

schedule::Layout draw_layout(Random* random) {
  schedule::Layout layout;
  const int most = draw_one_in(random, 30) ? 8 : draw_one_in(random, 4) ? 4 : 2;
  layout.num_replicates = draw(random, 1, most);
  layout.num_shards = draw(random, 1, most);
  const int num_units = draw(random, 1, draw_one_in(random, 2) ? 8 : 3);
  for (int unit = 0; unit < num_units; ++unit) {
    schedule::UnitLayout& drawn = layout.units.emplace_back();
    drawn.name = "unit" + std::to_string(unit);
    const int empty_in = draw(random, 1, 4);
    for (int slot = 0; slot < layout.num_slots(); ++slot)
      drawn.owner_elements.push_back(draw_one_in(random, empty_in) ? 0 : draw(random, 1, 100));
    drawn.weight_size = draw_one_in(random, 2) ? 2 : 4;
    drawn.gradient_size = draw_one_in(random, 2) ? 2 : 4;
  }
  // Units of one size, as layers are, come nearest to the memory that is granted.
  if (draw_one_in(random, 2)) {
    for (schedule::UnitLayout& unit : layout.units) {
      const std::string name = unit.name;
      unit = layout.units.front();
      unit.name = name;
    }
  }
  return layout;
}

schedule::Options draw_options(Random* random) {
  schedule::Options options;
  options.node_copy = !draw_one_in(random, 3);
  options.lookahead = draw_one_in(random, 2) ? draw(random, 0, 9) : draw(random, 0, 3);
  options.max_units_in_flight = draw_one_in(random, 3) ? draw(random, 2, 4) : 0;
  options.broadcast_before_reduce = !draw_one_in(random, 3);
  options.asynchronous = !draw_one_in(random, 3);
  return options;
}

// A use of a unit, and the uses inside it: units that are open are not used again.
void draw_use(Random* random, int num_units, int nesting, std::set<int>* open, Trace* uses) {
  const int unit = draw(random, 0, num_units - 1);
  if (!open->insert(unit).second) return;
  uses->push_back({Moment::kBeforeUse, unit});
  while (static_cast<int>(open->size()) < 4 && nesting > 0 && draw_one_in(random, nesting))
    draw_use(random, num_units, nesting, open, uses);
  uses->push_back({Moment::kAfterForward, unit});
  open->erase(unit);
}

Trace draw_uses(Random* random, int num_units) {
  Trace uses;
  std::set<int> open;
  if (draw_one_in(random, 2)) {
    for (int unit = 0; unit < num_units; ++unit) {
      uses.push_back({Moment::kBeforeUse, unit});
      uses.push_back({Moment::kAfterForward, unit});
    }
    // Tied: the last use is of the first unit's weights again.
    if (num_units > 1 && draw_one_in(random, 3)) {
      uses.push_back({Moment::kBeforeUse, 0});
      uses.push_back({Moment::kAfterForward, 0});
    }
    return uses;
  }
  const int nesting = draw_one_in(random, 2) ? 0 : draw(random, 2, 4);
  const int num_uses = draw(random, 1, 8);
  for (int use = 0; use < num_uses; ++use) draw_use(random, num_units, nesting, &open, &uses);
  return uses;
}

// What a rank traces if nothing is freed but by a backward.
Trace without_reshards(const Trace& uses, std::set<int> live) {
  Trace trace;
  for (const Trigger& trigger : uses) {
    if (trigger.moment == Moment::kAfterForward) continue;
    if (trigger.moment == Moment::kAfterBackward) live.erase(trigger.unit);
    if (trigger.moment == Moment::kBeforeUse && !live.insert(trigger.unit).second) continue;
    trace.push_back(trigger);
  }
  return trace;
}

// The uses from last to first. Some need no gradient; a unit may be used in the backward only.
Trace draw_backward(Random* random, int num_units, const Trace& uses) {
  Trace backward;
  const int dropped = draw_one_in(random, 4) ? draw(random, 0, 7) : -1;
  for (auto trigger = uses.rbegin(); trigger != uses.rend(); ++trigger) {
    if (trigger->unit == dropped) continue;
    const bool begins = trigger->moment == Moment::kAfterForward;
    backward.push_back({begins ? Moment::kBeforeUse : Moment::kAfterBackward, trigger->unit});
  }
  if (draw_one_in(random, 6)) {
    const int unit = draw(random, 0, num_units - 1);
    backward.push_back({Moment::kBeforeUse, unit});
    backward.push_back({Moment::kAfterBackward, unit});
  }
  return backward;
}

void draw_traces(Random* random, Job* job) {
  const int num_units = static_cast<int>(job->layout.units.size());
  const Trace uses = draw_uses(random, num_units);
  const Trace others = draw_one_in(random, 2) ? uses : draw_uses(random, num_units);
  job->reshard_after_forward = !draw_one_in(random, 4);
  job->backward = draw_backward(random, num_units, uses);
  job->forward = uses;
  job->evaluation = others;
  if (job->reshard_after_forward) {
    if (!job->forward.empty()) job->forward.pop_back();
    return;
  }
  std::set<int> used;
  for (const Trigger& trigger : uses) used.insert(trigger.unit);
  job->forward = without_reshards(uses, {});
  job->evaluation = without_reshards(others, {});
  job->backward = without_reshards(job->backward, used);
}

void draw_batches(Random* random, Job* job) {
  for (std::size_t slot = 0; slot < static_cast<std::size_t>(job->layout.num_slots()); ++slot) {
    std::vector<std::set<int>> batches(static_cast<std::size_t>(draw(random, 1, 4)));
    const int last = static_cast<int>(batches.size()) - 1;
    for (std::size_t unit = 0; unit < job->layout.units.size(); ++unit) {
      if (job->layout.units[unit].owner_elements[slot] == 0) continue;
      for (int part = draw(random, 1, 2); part > 0; --part)
        batches[static_cast<std::size_t>(draw(random, 0, last))].insert(static_cast<int>(unit));
    }
    std::vector<std::vector<int>>& all = job->batches.emplace_back();
    for (const std::set<int>& batch : batches) {
      if (!batch.empty()) all.emplace_back(batch.begin(), batch.end());
    }
  }
}

/// Events, with the first pass of a kind traced, and the one after a deviation.
class Historian {
 public:
  Historian(Random* random, Job* job) : random_(random), job_(job) {}

  void draw_events() {
    const bool no_sync = draw_one_in(random_, 2);
    const int num_steps = draw(random_, 1, 4);
    for (int step = 0; step < num_steps; ++step) {
      for (int left = draw(random_, 1, 3); left > 0; --left) {
        maybe_evaluate();
        if (draw_one_in(random_, 8)) add(What::kTrainForward, job_->forward);  // dropped
        add(What::kTrainForward, job_->forward);
        maybe_evaluate();
        add(no_sync && left > 1 ? What::kBackwardNoSync : What::kBackward, job_->backward);
      }
      maybe_evaluate();
      job_->events.push_back({What::kStep});
      // Nothing awaits what the first one publishes.
      if (draw_one_in(random_, 8)) job_->events.push_back({What::kStep});
    }
    if (draw_one_in(random_, 4)) add(What::kTrainForward, job_->forward);
    maybe_evaluate();
  }

 private:
  void maybe_evaluate() {
    if (draw_one_in(random_, 6)) add(What::kEvaluation, job_->evaluation);
  }

  void add(What what, const Trace& trace) {
    const bool backward = what == What::kBackward || what == What::kBackwardNoSync;
    bool& traced = traced_[backward ? 2 : static_cast<int>(what)];
    const bool deviates = traced && draw_one_in(random_, 30);
    const int replayed = !traced    ? 0
                         : deviates ? draw(random_, 0, static_cast<int>(trace.size()))
                                    : -1;
    traced = !deviates;
    job_->events.push_back({what, replayed});
  }

  Random* random_;
  Job* job_;
  bool traced_[3] = {false, false, false};
};

void draw_skips(Random* random, Job* job) {
  if (draw_one_in(random, 2)) return;
  const int one_in = draw(random, 1, 6);
  for (int slot = 0; slot < job->layout.num_slots(); ++slot) {
    for (int event = 0; event < static_cast<int>(job->events.size()); ++event) {
      for (int unit = 0; unit < static_cast<int>(job->layout.units.size()); ++unit) {
        if (draw_one_in(random, one_in)) job->skips.push_back({slot, event, unit});
      }
    }
  }
}

void print(std::ostream& out, const char* name, const Trace& trace) {
  out << "\n  " << name << ":";
  for (const Trigger& trigger : trace) out << " [" << trigger << "]";
}

}  // namespace

Job draw_job(Random* random) {
  Job job;
  job.layout = draw_layout(random);
  job.options = draw_options(random);
  draw_traces(random, &job);
  draw_batches(random, &job);
  Historian(random, &job).draw_events();
  draw_skips(random, &job);
  return job;
}

std::ostream& operator<<(std::ostream& out, const Job& job) {
  const schedule::Options& options = job.options;
  out << "mesh " << job.layout.num_replicates << " x " << job.layout.num_shards << ", lookahead "
      << options.lookahead << ", max_units_in_flight " << options.max_units_in_flight
      << (options.node_copy ? "" : ", no node copies")
      << (options.broadcast_before_reduce ? "" : ", reduce before broadcast")
      << (options.asynchronous ? "" : ", synchronous")
      << (job.reshard_after_forward ? "" : ", no reshard after forward");
  for (const schedule::UnitLayout& unit : job.layout.units) {
    out << "\n  " << unit.name << ": " << unit.weight_size << " and " << unit.gradient_size
        << " bytes x";
    for (const std::int64_t elements : unit.owner_elements) out << ' ' << elements;
  }
  print(out, "forward", job.forward);
  print(out, "backward", job.backward);
  print(out, "evaluation", job.evaluation);
  out << "\n  events:";
  constexpr const char* kNames[] = {"forward", "evaluation", "backward", "backward_no_sync",
                                    "step"};
  for (const Event& event : job.events) {
    out << ' ' << kNames[static_cast<int>(event.what)];
    if (event.replayed >= 0) out << "(replays " << event.replayed << ')';
  }
  out << "\n  batches:";
  for (std::size_t slot = 0; slot < job.batches.size(); ++slot) {
    out << " slot " << slot;
    for (const std::vector<int>& batch : job.batches[slot]) {
      out << " {";
      for (const int unit : batch) out << ' ' << unit;
      out << " }";
    }
  }
  out << "\n  skips (slot, event, unit):";
  for (const Skip& skip : job.skips)
    out << " (" << skip.slot << ", " << skip.event << ", " << skip.unit << ')';
  return out << '\n';
}

}  // namespace dmuon::simulate
