#include "dmuon/predict/timeline.h"

#include <algorithm>
#include <iterator>

#include "dmuon/core/error.h"
#include "dmuon/simulate/critical_path.h"

namespace dmuon::predict {
namespace {

using schedule::Lane;
using simulate::SimulatedSpan;

struct Interval {
  double begin;
  double end;
};
using Intervals = std::vector<Interval>;  // ascending, apart

double length(const Intervals& all) {
  double sum = 0;
  for (const Interval& one : all) sum += one.end - one.begin;
  return sum;
}

Intervals common(const Intervals& a, const Intervals& b) {
  Intervals both;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const double begin = std::max(a[i].begin, b[j].begin);
    const double end = std::min(a[i].end, b[j].end);
    if (begin < end) both.push_back({begin, end});
    ++(a[i].end < b[j].end ? i : j);
  }
  return both;
}

// A lane's spans follow one another.
void append(Intervals* all, double begin, double end) {
  if (begin >= end) return;
  if (!all->empty() && all->back().end >= begin) {
    all->back().end = std::max(all->back().end, end);
  } else {
    all->push_back({begin, end});
  }
}

Intervals merged(const Intervals& a, const Intervals& b) {
  Intervals sorted;
  std::ranges::merge(a, b, std::back_inserter(sorted), {}, &Interval::begin, &Interval::begin);
  Intervals all;
  for (const Interval& one : sorted) append(&all, one.begin, one.end);
  return all;
}

Intervals without(const Intervals& all, const Intervals& taken) {
  Intervals left;
  std::size_t j = 0;
  for (Interval one : all) {
    while (j < taken.size() && taken[j].end <= one.begin) ++j;
    for (std::size_t k = j; k < taken.size() && taken[k].begin < one.end; ++k) {
      if (taken[k].begin > one.begin) left.push_back({one.begin, taken[k].begin});
      one.begin = std::max(one.begin, taken[k].end);
    }
    if (one.begin < one.end) left.push_back(one);
  }
  return left;
}

std::size_t event_of(int step, Phase phase) {
  return static_cast<std::size_t>(step) * kNumPhases + static_cast<std::size_t>(phase);
}

// The times at which the program has issued and computed all of each event.
std::vector<double> ends_of(const simulate::Program& program,
                            const std::vector<SimulatedSpan>& timeline) {
  std::vector<double> ends(static_cast<std::size_t>(program.issues.back().event) + 1, 0.0);
  for (const SimulatedSpan& span : timeline) {
    double& end = ends[static_cast<std::size_t>(program.issue(span.issue).event)];
    end = std::max(end, span.lane == Lane::kCompute ? span.end_us : span.issued_us);
  }
  // An event without operations takes no time.
  for (std::size_t i = 1; i < ends.size(); ++i) ends[i] = std::max(ends[i], ends[i - 1]);
  return ends;
}

struct Lanes {
  schedule::PerLane<Intervals> busy;
  Intervals waits;
  Intervals waits_outside;     // of these, for what FSDP2 moves
  Intervals waits_update;      // of these, for updates by themselves
  PerCause<Intervals> causes;  // of waits that are not outside
  Intervals messages;          // the others'
};

// Asks for causes of waits that overlap the window.
Lanes lanes_of(const simulate::Program& program, const std::vector<SimulatedSpan>& timeline,
               const Surroundings& around, const Interval& window, const CausesOf& causes_of) {
  const auto is_outside = [&](const simulate::Issue& issue) {
    return around.fsdp2_unit && !issue.is_on_batch() && issue.unit() == *around.fsdp2_unit;
  };
  schedule::PerLane<Intervals> messages;
  Lanes lanes{};
  for (const SimulatedSpan& span : timeline) {
    const simulate::Issue& issue = program.issue(span.issue);
    if (span.lane == Lane::kCompute && !issue.compute) {
      append(&lanes.waits, span.issued_us, span.start_us);
      if (is_outside(issue)) {
        append(&lanes.waits_outside, span.issued_us, span.start_us);
      } else if (span.issued_us < span.start_us && span.issued_us < window.end &&
                 span.start_us > window.begin) {
        for (const Awaited& part : causes_of(span))
          append(&lanes.causes[part.cause], part.begin_us, part.end_us);
      }
      if (issue.is(schedule::Kind::kFinishUpdate))
        append(&lanes.waits_update, span.issued_us, span.start_us);
      continue;
    }
    const double done_us =
        span.end_us - (issue.compute && around.blocked_us ? around.blocked_us(issue) : 0);
    append(&lanes.busy[span.lane], span.start_us, done_us);
    append(&lanes.waits, done_us, span.end_us);
    append(&lanes.waits_outside, done_us, span.end_us);
    if (!issue.compute && !is_outside(issue))
      append(&messages[span.lane], span.start_us, span.end_us);
  }
  lanes.messages = merged(messages[Lane::kIntra], messages[Lane::kInter]);
  return lanes;
}

Cause cause_of(Lane lane) {
  switch (lane) {
    case Lane::kIntra:
      return Cause::kIntra;
    case Lane::kInter:
      return Cause::kInter;
    case Lane::kSlices:
    case Lane::kUpdate:
      return Cause::kUpdate;
    case Lane::kCompute:
      return Cause::kPeers;
  }
  core::invariant(false, "predict: lane ", static_cast<int>(lane));
  return Cause::kPeers;
}

double slack(const Intervals& waits, const Lanes& lanes, const Intervals& modules, bool on_cpu) {
  const Intervals& update = lanes.busy[Lane::kUpdate];
  const Intervals held_up =
      common(on_cpu ? merged(update, lanes.busy[Lane::kIntra]) : update, modules);
  if (held_up.empty() || waits.empty()) return 0;
  const Intervals later{{held_up.front().begin, waits.back().end}};
  const Intervals idle = without(common(waits, later), update);
  const Intervals inside = common(idle, lanes.busy[Lane::kIntra]);
  return length(inside) +
         length(common(without(idle, lanes.busy[Lane::kIntra]), lanes.busy[Lane::kInter]));
}

}  // namespace

const char* name_of(Phase phase) {
  constexpr std::array kNames{"forward", "backward", "step"};
  return kNames.at(static_cast<std::size_t>(phase));
}

const char* name_of(Cause cause) {
  constexpr std::array kNames{"outside", "intra", "inter", "update", "peers"};
  return kNames.at(static_cast<std::size_t>(cause));
}

CausesOf critical_causes(const simulate::Programs& programs, const simulate::Execution& execution,
                         core::Owner rank) {
  return [&, rank](const SimulatedSpan& span) {
    std::vector<Awaited> wait;
    for (const auto& part : simulate::critical_path(execution, rank, span.issue, span.issued_us)) {
      if (part.begin_us >= span.start_us) break;
      wait.push_back(
          {cause_of(programs[part.rank].issue(part.issue).lane()), part.begin_us, part.end_us});
    }
    return wait;
  };
}

RankStep measure(const simulate::Program& program, const std::vector<SimulatedSpan>& timeline,
                 int step, const Surroundings& around, const CausesOf& causes_of) {
  const std::vector<double> ends = ends_of(program, timeline);
  const Interval whole{ends[event_of(step, Phase::kForward) - 1],
                       ends[event_of(step, Phase::kStep)]};
  const Lanes lanes = lanes_of(program, timeline, around, whole, causes_of);
  RankStep result;
  for (const Phase phase : kPhases) {
    const std::size_t event = event_of(step, phase);
    const Intervals window{{ends[event - 1], ends[event]}};
    result.elapsed_us[phase] = ends[event] - ends[event - 1];
    const Intervals modules = common(lanes.busy[Lane::kCompute], window);
    for (const Lane lane : core::EachOf<Lane, schedule::kNumLanes>{}) {
      result.busy_us[phase][lane] = length(common(lanes.busy[lane], window));
      result.beside_us[phase][lane] = length(common(lanes.busy[lane], modules));
    }
    const Intervals waits = common(lanes.waits, window);
    const Intervals left = without(waits, lanes.waits_outside);
    result.slack_us[phase] = slack(left, lanes, modules, around.on_cpu);
    for (const Cause cause : kCauses)
      result.waits_us[phase][cause] = length(common(lanes.causes[cause], window));
    result.waits_us[phase][Cause::kOutside] = length(common(waits, lanes.waits_outside));
    const Intervals messages = common(lanes.messages, window);
    result.messages_us += length(messages);
    result.awaited_us += length(common(messages, without(left, lanes.waits_update)));
  }
  for (const SimulatedSpan& span : timeline) {
    const simulate::Issue& issue = program.issue(span.issue);
    if (static_cast<std::size_t>(issue.event) == event_of(step, Phase::kStep) &&
        (issue.is(schedule::Kind::kFinishRouteIntra) ||
         issue.is(schedule::Kind::kFinishRouteInter)))
      result.routes_in_step_us += span.start_us - span.issued_us;
  }
  return result;
}

HeldUp held_up_in(const RankStep& step, bool on_cpu) {
  HeldUp result;
  for (const Phase phase : kPhases) {
    const double of_update = step.beside_us[phase][Lane::kUpdate];
    const double us = of_update + (on_cpu ? step.beside_us[phase][Lane::kIntra] : 0);
    const double spared = phase == Phase::kForward ? std::min(us, step.slack_us[phase]) : 0;
    result.update_us += std::max(0.0, of_update - spared);
    result.all_us += us - spared;
    result.spared_us += spared;
  }
  return result;
}

std::vector<SimulatedSpan> spans_of(const simulate::Program& program,
                                    const std::vector<SimulatedSpan>& timeline, int step) {
  const std::vector<double> ends = ends_of(program, timeline);
  const std::size_t first = event_of(step, Phase::kForward);
  const double begin = ends[first - 1];
  const double end = ends[first + kNumPhases - 1];
  std::vector<SimulatedSpan> spans;
  for (SimulatedSpan span : timeline) {
    if (span.end_us <= begin || span.end_us > end) continue;
    span.issued_us -= begin;
    span.start_us = std::max(span.start_us - begin, 0.0);
    span.end_us -= begin;
    spans.push_back(span);
  }
  return spans;
}

}  // namespace dmuon::predict
