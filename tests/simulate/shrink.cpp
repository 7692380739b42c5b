#include "tests/simulate/shrink.h"

#include <algorithm>
#include <utility>

#include "tests/simulate/random_job.h"

namespace dmuon::simulate {
namespace {

using core::Slot;
using core::UnitIndex;
using schedule::Moment;
using schedule::Trace;
using schedule::Trigger;
using What = TrainingEvent::What;

template <typename T>
void erase_at(std::vector<T>* items, std::size_t index) {
  items->erase(items->begin() + static_cast<std::ptrdiff_t>(index));
}

template <typename I, typename T>
void erase_at(core::Vector<I, T>* items, I index) {
  std::vector<T> values = items->values();
  erase_at(&values, index.position());
  *items = core::Vector<I, T>(std::move(values));
}

Job without_event(Job job, int event) {
  erase_at(&job.events, static_cast<std::size_t>(event));
  std::erase_if(job.skips, [&](const Skip& skip) { return skip.event == event; });
  for (Skip& skip : job.skips) skip.event -= skip.event > event ? 1 : 0;
  return job;
}

Job without_unit(Job job, UnitIndex unit) {
  const auto renamed = [&](UnitIndex other) {
    return UnitIndex(other.value() - (other > unit ? 1 : 0));
  };
  erase_at(&job.layout.units, unit);
  std::vector<Trace*> traces{&job.forward, &job.backward, &job.evaluation};
  for (TrainingEvent& event : job.events) traces.push_back(&event.instead);
  for (Trace* trace : traces) {
    std::erase_if(*trace, [&](const Trigger& trigger) { return trigger.unit == unit; });
    for (Trigger& trigger : *trace) trigger.unit = renamed(trigger.unit);
  }
  std::erase_if(job.skips, [&](const Skip& skip) { return skip.unit == unit; });
  for (Skip& skip : job.skips) skip.unit = renamed(skip.unit);
  for (schedule::Batches& batches : job.batches) {
    schedule::Batches left;
    for (std::vector<UnitIndex> batch : batches) {
      std::erase(batch, unit);
      for (UnitIndex& touched : batch) touched = renamed(touched);
      if (!batch.empty()) left.push_back(std::move(batch));
    }
    batches = std::move(left);
  }
  return job;
}

// The mesh without its last replicate, or without its last shard.
Job on_smaller_mesh(Job job, bool drop_replicate) {
  const schedule::Layout mesh = job.layout;
  const auto is_dropped = [&](Slot slot) {
    return drop_replicate ? mesh.replicate_of(slot).value() == mesh.num_replicates - 1
                          : mesh.shard_of(slot).value() == mesh.num_shards - 1;
  };
  --(drop_replicate ? job.layout.num_replicates : job.layout.num_shards);
  for (int i = mesh.num_slots(); i-- > 0;) {
    const Slot slot(i);
    if (!is_dropped(slot)) continue;
    for (schedule::UnitLayout& unit : job.layout.units) erase_at(&unit.owner_elements, slot);
    erase_at(&job.batches, slot);
  }
  for (schedule::UnitLayout& unit : job.layout.units)
    unit.kept_elements = std::min(
        unit.kept_elements, std::max<std::int64_t>(least_of_a_column(job.layout, unit) - 1, 0));
  std::erase_if(job.skips, [&](const Skip& skip) { return is_dropped(skip.slot); });
  for (Skip& skip : job.skips)
    skip.slot = job.layout.slot_at(mesh.replicate_of(skip.slot), mesh.shard_of(skip.slot));
  return job;
}

// Without the use that begins at `place` of one of the traces.
Job without_use(Job job, Trace Job::*member, std::size_t place) {
  Trace& trace = job.*member;
  const UnitIndex unit = trace[place].unit;
  for (std::size_t i = place + 1; i < trace.size(); ++i) {
    if (trace[i].unit != unit) continue;
    if (trace[i].moment != Moment::kBeforeUse) erase_at(&trace, i);
    break;
  }
  erase_at(&trace, place);
  return job;
}

void add_smaller_options(const Job& job, std::vector<Job>* smaller) {
  const auto add = [&](auto&& change) {
    Job changed = job;
    change(&changed);
    smaller->push_back(std::move(changed));
  };
  if (job.options.lookahead > 0) add([](Job* other) { --other->options.lookahead; });
  if (job.options.max_units_in_flight != 0)
    add([](Job* other) { other->options.max_units_in_flight = 0; });
  if (job.options.late_updates) add([](Job* other) { other->options.late_updates = false; });
  if (!job.options.node_copy) add([](Job* other) { other->options.node_copy = true; });
  const auto keeps = [](const schedule::UnitLayout& unit) { return unit.kept_elements > 0; };
  if (std::any_of(job.layout.units.begin(), job.layout.units.end(), keeps)) {
    add([](Job* other) {
      for (schedule::UnitLayout& unit : other->layout.units) unit.kept_elements = 0;
    });
  }
  if (!job.skips.empty()) add([](Job* other) { other->skips.clear(); });
  for (std::size_t i = 0; i < job.skips.size() && job.skips.size() < 20; ++i)
    add([&](Job* other) { erase_at(&other->skips, i); });
  for (std::size_t i = 0; i < job.events.size(); ++i) {
    if (!job.events[i].instead.empty()) add([&](Job* other) { other->events[i].instead.clear(); });
  }
}

std::vector<Job> smaller_jobs(const Job& job) {
  std::vector<Job> smaller;
  for (std::size_t event = job.events.size(); event-- > 0;) {
    smaller.push_back(without_event(job, static_cast<int>(event)));
    if (event > 0 && job.events[event].what != What::kStep)
      smaller.push_back(
          without_event(without_event(job, static_cast<int>(event)), static_cast<int>(event) - 1));
  }
  if (job.layout.num_replicates > 1) smaller.push_back(on_smaller_mesh(job, true));
  if (job.layout.num_shards > 1) smaller.push_back(on_smaller_mesh(job, false));
  for (const UnitIndex unit : job.layout.units.indices()) {
    if (job.layout.units.size() > 1) smaller.push_back(without_unit(job, unit));
  }
  for (const auto member : {&Job::forward, &Job::backward, &Job::evaluation}) {
    for (std::size_t place = 0; place < (job.*member).size(); ++place) {
      if ((job.*member)[place].moment == Moment::kBeforeUse)
        smaller.push_back(without_use(job, member, place));
    }
  }
  add_smaller_options(job, &smaller);
  return smaller;
}

}  // namespace

Job shrink(Job job, const std::function<bool(const Job&)>& fails) {
  while (true) {
    std::vector<Job> smaller = smaller_jobs(job);
    const auto found = std::find_if(smaller.begin(), smaller.end(), fails);
    if (found == smaller.end()) return job;
    job = *found;
  }
}

}  // namespace dmuon::simulate
