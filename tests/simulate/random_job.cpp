#include "tests/simulate/random_job.h"

#include <algorithm>
#include <set>
#include <utility>

namespace dmuon::simulate {
namespace {

using core::UnitIndex;
using schedule::Moment;
using schedule::Trace;
using schedule::Trigger;
using What = TrainingEvent::What;

schedule::Layout draw_layout(Random* random) {
  schedule::Layout layout;
  const int most = draw_one_in(random, 30) ? 8 : draw_one_in(random, 4) ? 4 : 2;
  layout.num_replicates = draw(random, 1, most);
  layout.num_shards = draw(random, 1, most);
  layout.tensor_parallel = draw_one_in(random, 3) ? draw(random, 2, 3) : 1;
  const int num_units = draw(random, 1, draw_one_in(random, 2) ? 8 : 3);
  for (int unit = 0; unit < num_units; ++unit) {
    schedule::UnitLayout drawn;
    drawn.name = "unit" + std::to_string(unit);
    const int empty_in = draw(random, 1, 4);
    for (int slot = 0; slot < layout.num_slots(); ++slot)
      drawn.owner_elements.push_back(draw_one_in(random, empty_in) ? 0 : draw(random, 1, 100));
    drawn.weight_size = draw_one_in(random, 2) ? 2 : 4;
    drawn.gradient_size = draw_one_in(random, 2) ? 2 : 4;
    layout.units.push_back(std::move(drawn));
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

schedule::StepOptions draw_options(Random* random) {
  schedule::StepOptions options;
  options.node_copy = !draw_one_in(random, 3);
  options.lookahead = draw_one_in(random, 2) ? draw(random, 0, 9) : draw(random, 0, 3);
  options.max_units_in_flight = draw_one_in(random, 3) ? draw(random, 2, 4) : 0;
  options.late_updates = draw_one_in(random, 2);
  return options;
}

// A use of a unit, and the uses inside it: units that are open are not used again.
void draw_use(Random* random, int num_units, int nesting, std::set<UnitIndex>* open, Trace* uses) {
  const UnitIndex unit(draw(random, 0, num_units - 1));
  if (!open->insert(unit).second) return;
  uses->push_back({Moment::kBeforeUse, unit});
  while (static_cast<int>(open->size()) < 4 && nesting > 0 && draw_one_in(random, nesting))
    draw_use(random, num_units, nesting, open, uses);
  uses->push_back({Moment::kAfterForward, unit});
  open->erase(unit);
}

Trace draw_uses(Random* random, int num_units) {
  Trace uses;
  std::set<UnitIndex> open;
  const auto use = [&](UnitIndex unit) {
    uses.push_back({Moment::kBeforeUse, unit});
    uses.push_back({Moment::kAfterForward, unit});
  };
  if (draw_one_in(random, 2)) {
    for (const UnitIndex unit : core::Indices<UnitIndex>(num_units)) use(unit);
    // Tied: the last use is of the first unit's weights again.
    if (num_units > 1 && draw_one_in(random, 3)) use(UnitIndex(0));
    return uses;
  }
  const int nesting = draw_one_in(random, 2) ? 0 : draw(random, 2, 4);
  const int num_uses = draw(random, 1, 8);
  for (int i = 0; i < num_uses; ++i) draw_use(random, num_units, nesting, &open, &uses);
  return uses;
}

// The uses from last to first. Some need no gradient; a unit may be used in the backward only.
Trace draw_backward(Random* random, int num_units, const Trace& uses) {
  Trace backward;
  const UnitIndex dropped(draw_one_in(random, 4) ? draw(random, 0, 7) : -1);
  for (auto trigger = uses.rbegin(); trigger != uses.rend(); ++trigger) {
    if (trigger->unit == dropped) continue;
    const bool begins = trigger->moment == Moment::kAfterForward;
    backward.push_back({begins ? Moment::kBeforeUse : Moment::kAfterBackward, trigger->unit});
  }
  if (draw_one_in(random, 6)) {
    const UnitIndex unit(draw(random, 0, num_units - 1));
    backward.push_back({Moment::kBeforeUse, unit});
    backward.push_back({Moment::kAfterBackward, unit});
  }
  return backward;
}

void draw_traces(Random* random, Job* job) {
  const int num_units = job->layout.units.size();
  job->forward = draw_uses(random, num_units);
  job->evaluation = draw_one_in(random, 2) ? job->forward : draw_uses(random, num_units);
  job->backward = draw_backward(random, num_units, job->forward);
  job->options.reshard_after_forward = !draw_one_in(random, 4);
  job->options.replicated = draw_one_in(random, 6);
  if (job->options.replicated) job->options.node_copy = job->options.reshard_after_forward = false;
}

void draw_batches(Random* random, Job* job) {
  for (const core::Slot slot : core::Indices<core::Slot>(job->layout.num_slots())) {
    std::vector<std::set<UnitIndex>> drawn(static_cast<std::size_t>(draw(random, 1, 4)));
    const int last = static_cast<int>(drawn.size()) - 1;
    for (const UnitIndex unit : job->layout.units.indices()) {
      if (job->layout.units[unit].owner_elements[slot] == 0) continue;
      for (int part = draw(random, 1, 2); part > 0; --part)
        drawn[static_cast<std::size_t>(draw(random, 0, last))].insert(unit);
    }
    schedule::Batches batches;
    for (const std::set<UnitIndex>& units : drawn) {
      if (!units.empty()) batches.push_back({units.begin(), units.end()});
    }
    job->batches.push_back(std::move(batches));
  }
}

bool nests(const Trace& uses) {
  return std::adjacent_find(
             uses.begin(), uses.end(), [](const Trigger& first, const Trigger& next) {
               return first.moment == Moment::kBeforeUse && next.moment == Moment::kBeforeUse;
             }) != uses.end();
}

/// Events, some of which deviate. Not where uses nest: a pass that nests them otherwise than its
/// trace does, and needs nothing that the trace lacks, is not supported. The engine then raises,
/// because a unit is read that the trace has released.
class Historian {
 public:
  Historian(Random* random, Job* job) : random_(random), job_(job) {}

  void draw_events() {
    const bool no_sync = draw_one_in(random_, 2);
    const int num_steps = draw(random_, 1, 4);
    for (int step = 0; step < num_steps; ++step) {
      for (int left = draw(random_, 1, 3); left > 0; --left) {
        maybe_evaluate();
        if (draw_one_in(random_, 8)) add(What::kTrainForward);  // dropped
        add(What::kTrainForward);
        maybe_evaluate();
        const bool syncs = !no_sync || (left == 1 && !draw_one_in(random_, 4));
        add(syncs ? What::kBackward : What::kBackwardNoSync);
      }
      maybe_evaluate();
      job_->events.push_back({What::kStep});
      // Nothing awaits what the first one publishes.
      if (draw_one_in(random_, 8)) job_->events.push_back({What::kStep});
      // Of a forward before the step, whose weights come again.
      if (draw_one_in(random_, 8)) add(What::kBackward);
    }
    if (draw_one_in(random_, 4)) add(What::kTrainForward);
    maybe_evaluate();
  }

 private:
  void maybe_evaluate() {
    if (draw_one_in(random_, 6)) add(What::kEvaluation);
  }

  void add(What what) {
    TrainingEvent& event = job_->events.emplace_back(TrainingEvent{what});
    if (!draw_one_in(random_, 30) || nests(job_->forward) || nests(job_->evaluation)) return;
    for (int left = draw(random_, 1, 6); left > 0; --left) {
      const UnitIndex unit(draw(random_, 0, job_->layout.units.size() - 1));
      event.instead.push_back({Moment::kBeforeUse, unit});
      event.instead.push_back(
          {is_backward(what) ? Moment::kAfterBackward : Moment::kAfterForward, unit});
    }
  }

  Random* random_;
  Job* job_;
};

// Those no rank skips, for that is not supported: the ranks that do not skip raise.
void draw_host_units(Random* random, Job* job) {
  if (!draw_one_in(random, 3)) return;
  for (schedule::UnitLayout& unit : job->layout.units) unit.host = draw_one_in(random, 3);
}

// Of some units every column keeps a part, but not all that it has: the simulator's data are whole
// parts of a column, which all ranks of a node must have.
void draw_kept_elements(Random* random, schedule::Layout* layout) {
  if (!draw_one_in(random, 4)) return;
  const std::int64_t most = draw(random, 0, 200);
  for (schedule::UnitLayout& unit : layout->units)
    unit.kept_elements =
        std::min(most, std::max<std::int64_t>(least_of_a_column(*layout, unit) - 1, 0));
}

void draw_skips(Random* random, Job* job) {
  if (draw_one_in(random, 2)) return;
  const int one_in = draw(random, 1, 6);
  for (const core::Slot slot : core::Indices<core::Slot>(job->layout.num_slots())) {
    for (int event = 0; event < static_cast<int>(job->events.size()); ++event) {
      const bool all = draw_one_in(random, 6);
      for (const UnitIndex unit : job->layout.units.indices()) {
        if (job->layout.units[unit].host) continue;
        if (all || draw_one_in(random, one_in)) job->skips.push_back({slot, event, unit});
      }
    }
  }
}

void draw_read_units(Random* random, Job* job) {
  if (!draw_one_in(random, 3)) return;
  for (const UnitIndex unit : job->layout.units.indices()) {
    if (draw_one_in(random, 2)) job->read.insert(unit);
  }
}

void print(std::ostream& out, const char* name, const Trace& trace) {
  out << "\n  " << name << ":";
  for (const Trigger& trigger : trace) out << " [" << trigger << "]";
}

}  // namespace

std::int64_t least_of_a_column(const schedule::Layout& layout, const schedule::UnitLayout& unit) {
  core::Vector<core::Shard, std::int64_t> columns;
  for (int shard = 0; shard < layout.num_shards; ++shard) columns.push_back(0);
  for (const core::Slot slot : unit.owner_elements.indices())
    columns[layout.shard_of(slot)] += unit.owner_elements[slot];
  return *std::min_element(columns.begin(), columns.end());
}

Job draw_job(Random* random) {
  Job job;
  job.layout = draw_layout(random);
  job.options = draw_options(random);
  draw_traces(random, &job);
  draw_batches(random, &job);
  Historian(random, &job).draw_events();
  draw_host_units(random, &job);
  draw_skips(random, &job);
  draw_kept_elements(random, &job.layout);
  draw_read_units(random, &job);
  return job;
}

std::ostream& operator<<(std::ostream& out, const Job& job) {
  const schedule::StepOptions& options = job.options;
  out << "mesh " << job.layout.num_replicates << " x " << job.layout.num_shards << ", lookahead "
      << options.lookahead << ", max_units_in_flight " << options.max_units_in_flight
      << (options.node_copy ? "" : ", no node copies")
      << (options.reshard_after_forward ? "" : ", no reshard after forward")
      << (options.late_updates ? ", late updates" : "")
      << (options.replicated ? ", replicated" : "");
  for (const schedule::UnitLayout& unit : job.layout.units) {
    out << "\n  " << unit.name << (unit.host ? ", the host's: " : ": ") << unit.weight_size
        << " and " << unit.gradient_size << " bytes x";
    for (const std::int64_t elements : unit.owner_elements) out << ' ' << elements;
    if (unit.kept_elements > 0) out << ", of which a column keeps " << unit.kept_elements;
  }
  print(out, "forward", job.forward);
  print(out, "backward", job.backward);
  print(out, "evaluation", job.evaluation);
  out << "\n  events:";
  constexpr const char* kNames[] = {"forward", "evaluation", "backward", "backward_no_sync",
                                    "step"};
  for (const TrainingEvent& event : job.events) {
    out << ' ' << kNames[static_cast<int>(event.what)];
    if (!event.instead.empty()) print(out, "instead", event.instead);
  }
  out << "\n  batches:";
  for (const core::Slot slot : job.batches.indices()) {
    out << " slot " << slot;
    for (const std::vector<UnitIndex>& batch : job.batches[slot]) {
      out << " {";
      for (const UnitIndex unit : batch) out << ' ' << unit;
      out << " }";
    }
  }
  out << "\n  read:";
  for (const UnitIndex unit : job.read) out << ' ' << unit;
  out << "\n  skips (slot, event, unit):";
  for (const Skip& skip : job.skips)
    out << " (" << skip.slot << ", " << skip.event << ", " << skip.unit << ')';
  return out << '\n';
}

}  // namespace dmuon::simulate
