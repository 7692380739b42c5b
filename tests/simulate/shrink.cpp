#include "tests/simulate/shrink.h"

#include <algorithm>
#include <utility>

namespace dmuon::simulate {
namespace {

using schedule::Moment;
using schedule::Trace;
using schedule::Trigger;
using What = Event::What;

template <typename T>
void erase_at(std::vector<T>* items, std::size_t index) {
  items->erase(items->begin() + static_cast<std::ptrdiff_t>(index));
}

// Every backward has its forward: what the program of a job must have.
bool is_possible(const Job& job) {
  bool forward = false;
  for (const Event& event : job.events) {
    const bool backward = event.what == What::kBackward || event.what == What::kBackwardNoSync;
    if (backward && !forward) return false;
    if (event.what == What::kTrainForward) forward = true;
    if (backward || event.what == What::kStep) forward = false;
  }
  return true;
}

Job without_event(Job job, int event) {
  erase_at(&job.events, static_cast<std::size_t>(event));
  std::erase_if(job.skips, [&](const Skip& skip) { return skip.event == event; });
  for (Skip& skip : job.skips) skip.event -= skip.event > event ? 1 : 0;
  return job;
}

Job without_unit(Job job, int unit) {
  erase_at(&job.layout.units, static_cast<std::size_t>(unit));
  for (Trace* trace : {&job.forward, &job.backward, &job.evaluation}) {
    std::erase_if(*trace, [&](const Trigger& trigger) { return trigger.unit == unit; });
    for (Trigger& trigger : *trace) trigger.unit -= trigger.unit > unit ? 1 : 0;
  }
  std::erase_if(job.skips, [&](const Skip& skip) { return skip.unit == unit; });
  for (Skip& skip : job.skips) skip.unit -= skip.unit > unit ? 1 : 0;
  for (auto& batches : job.batches) {
    for (std::vector<int>& batch : batches) {
      std::erase(batch, unit);
      for (int& touched : batch) touched -= touched > unit ? 1 : 0;
    }
    std::erase_if(batches, [](const std::vector<int>& batch) { return batch.empty(); });
  }
  return job;
}

// The mesh without its last replicate, or without its last shard.
Job on_smaller_mesh(Job job, bool drop_replicate) {
  const int shards = job.layout.num_shards;
  const auto is_dropped = [&](int slot) {
    return drop_replicate ? slot / shards == job.layout.num_replicates - 1
                          : slot % shards == shards - 1;
  };
  const auto place_of = [&](int slot) {
    return drop_replicate ? slot : slot / shards * (shards - 1) + slot % shards;
  };
  for (int slot = job.layout.num_slots(); slot-- > 0;) {
    if (!is_dropped(slot)) continue;
    for (schedule::UnitLayout& unit : job.layout.units)
      erase_at(&unit.owner_elements, static_cast<std::size_t>(slot));
    erase_at(&job.batches, static_cast<std::size_t>(slot));
  }
  std::erase_if(job.skips, [&](const Skip& skip) { return is_dropped(skip.slot); });
  for (Skip& skip : job.skips) skip.slot = place_of(skip.slot);
  --(drop_replicate ? job.layout.num_replicates : job.layout.num_shards);
  return job;
}

// Without the use that begins at `place` of one of the traces.
Job without_use(Job job, Trace Job::*member, std::size_t place) {
  Trace& trace = job.*member;
  const int unit = trace[place].unit;
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
  if (!job.options.node_copy) add([](Job* other) { other->options.node_copy = true; });
  if (!job.options.broadcast_before_reduce)
    add([](Job* other) { other->options.broadcast_before_reduce = true; });
  if (!job.options.asynchronous) add([](Job* other) { other->options.asynchronous = true; });
  if (!job.skips.empty()) add([](Job* other) { other->skips.clear(); });
  for (std::size_t i = 0; i < job.skips.size() && job.skips.size() < 20; ++i)
    add([&](Job* other) { erase_at(&other->skips, i); });
  for (std::size_t i = 0; i < job.events.size(); ++i) {
    if (job.events[i].replayed > 0) add([&](Job* other) { other->events[i].replayed = -1; });
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
  for (std::size_t unit = 0; job.layout.units.size() > 1 && unit < job.layout.units.size(); ++unit)
    smaller.push_back(without_unit(job, static_cast<int>(unit)));
  for (const auto member : {&Job::forward, &Job::backward, &Job::evaluation}) {
    for (std::size_t place = 0; place < (job.*member).size(); ++place) {
      if ((job.*member)[place].moment == Moment::kBeforeUse)
        smaller.push_back(without_use(job, member, place));
    }
  }
  add_smaller_options(job, &smaller);
  std::erase_if(smaller, [](const Job& candidate) { return !is_possible(candidate); });
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
