#include "dmuon/schedule/step_schedule.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <set>

#include "dmuon/core/error.h"

namespace dmuon::schedule {
namespace {

constexpr int kMostRoutesInFlight = 2;  // one in each stage

bool uses_weights(const Trigger& trigger) { return trigger.moment == Moment::kBeforeUse; }

std::vector<int> units_by_first_use(const Trace& trace) {
  std::vector<int> units;
  for (const Trigger& trigger : trace) {
    const bool known = std::find(units.begin(), units.end(), trigger.unit) != units.end();
    if (uses_weights(trigger) && !known) units.push_back(trigger.unit);
  }
  return units;
}

/// How far ahead things go, from the options, the mesh and the memory that the options grant.
struct Window {
  int inter;   // uses that stage 1 goes ahead
  int intra;   // uses that stage 2 goes ahead
  int routes;  // in flight while another unit is in its backward
};

Window window_of(const Layout& layout, const Options& options) {
  const bool through_buffers = layout.num_replicates > 1 && !options.node_copy;
  const int most_ahead = options.units_in_flight() - 1;
  Window window{};
  window.inter = through_buffers ? std::min(options.lookahead, most_ahead) : options.lookahead;
  window.intra = std::min({1, options.lookahead, most_ahead});

  std::int64_t weights = 0;
  std::int64_t gradients = 0;
  for (const UnitLayout& unit : layout.units) {
    weights = std::max(weights, unit.num_elements() * unit.weight_size);
    gradients = std::max(gradients, unit.num_elements() * unit.gradient_size);
  }
  // A route in flight holds gradients and an inbox no larger.
  const std::int64_t buffers = 1 + (through_buffers ? window.inter : window.intra);
  const std::int64_t granted = options.units_in_flight() * (weights + gradients);
  const int most_routes = std::min(options.lookahead, kMostRoutesInFlight);
  while (window.routes < most_routes &&
         buffers * weights + (3 + 2 * window.routes) * gradients <= granted) {
    ++window.routes;
  }
  return window;
}

/// The operations that make operations of a mesh: what a stage that the mesh lacks leaves out.
class Maker {
 public:
  explicit Maker(const Layout& layout) : has_inter_(layout.num_replicates > 1) {}

  bool has_inter() const { return has_inter_; }

  Operation publish_inter(int unit) const { return {Kind::kPublishInter, unit, 0, {}}; }
  Operation publish_intra(int unit) const {
    Operation operation{Kind::kPublishIntra, unit, 0, {}};
    if (has_inter_) operation.after.push_back({Kind::kPublishInter, unit});
    return operation;
  }
  Operation await_weights(int unit) const {
    return {Kind::kAwaitWeights, unit, 0, {{Kind::kPublishIntra, unit}}};
  }
  // A buffer that nobody awaited may still be on its way.
  Operation reshard(int unit) const {
    Operation operation{Kind::kReshard, unit, 0, {{Kind::kPublishIntra, unit}}};
    if (has_inter_) operation.after.push_back({Kind::kPublishInter, unit});
    return operation;
  }
  std::vector<Operation> route(int unit, bool sync) const {
    std::vector<Operation> operations{{Kind::kRouteIntra, unit, 0, {}}};
    if (has_inter_ && sync)
      operations.push_back({Kind::kRouteInter, unit, 0, {{Kind::kRouteIntra, unit}}});
    return operations;
  }
  Operation finish_route(int unit, bool sync) const {
    return {Kind::kFinishRoute,
            unit,
            0,
            {{has_inter_ && sync ? Kind::kRouteInter : Kind::kRouteIntra, unit}}};
  }

 private:
  bool has_inter_;
};

/// Builds one pass: what each trigger does by itself goes to `before` and `after`, and
/// publications, which move ahead, between.
class PassBuilder {
 public:
  PassBuilder(const Layout& layout, const Trace& trace, const Trace& forward, Pass pass,
              const Options& options, bool sync)
      : maker_(layout),
        trace_(trace),
        pass_(pass),
        options_(options),
        sync_(sync),
        window_(window_of(layout, options)),
        slots_(trace.size()) {
    for (std::size_t i = 0; i < trace.size(); ++i) {
      if (uses_weights(trace[i])) uses_.push_back(i);
    }
    if (maker_.has_inter()) publish_inter(units_by_first_use(forward));
    publish_intra();
    serve_triggers();
  }

  PassSchedule take() {
    PassSchedule schedule;
    for (Slot& slot : slots_) {
      std::vector<Operation>& all = schedule.at.emplace_back(std::move(slot.before));
      for (const auto& part : {slot.inter, slot.intra, slot.after}) {
        all.insert(all.end(), part.begin(), part.end());
      }
    }
    while (!in_flight_.empty()) schedule.end.push_back(finish_oldest());
    return schedule;
  }

 private:
  struct Slot {
    std::vector<Operation> before, inter, intra, after;
  };

  // Where a publication for the use at uses_[use] is issued that may go `ahead` uses ahead: not
  // before the unit's buffer is free.
  std::size_t place(std::size_t use, int ahead) const {
    const auto distance = static_cast<std::size_t>(ahead);
    std::size_t place = use >= distance ? uses_[use - distance] : uses_[0];
    const std::size_t last = uses_[use];
    for (std::size_t i = last; ahead > 0 && i-- > place;) {
      const bool freed = trace_[i].unit == trace_[last].unit && !uses_weights(trace_[i]);
      const bool reduces = trace_[i].moment == Moment::kAfterBackward;
      if (freed || (reduces && !options_.broadcast_before_reduce)) place = i;
    }
    return place;
  }

  void publish_inter(const std::vector<int>& forward_units) {
    if (!options_.node_copy) {
      for (std::size_t use = 0; use < uses_.size(); ++use) {
        const Operation operation = maker_.publish_inter(trace_[uses_[use]].unit);
        slots_[place(use, window_.inter)].inter.push_back(operation);
      }
      return;
    }
    // Once a version: with the first use in a forward; in a backward, units that the forward left
    // out.
    std::vector<std::size_t> first_uses;
    std::set<int> seen;
    if (pass_ == Pass::kBackward) seen.insert(forward_units.begin(), forward_units.end());
    for (const std::size_t use : uses_) {
      if (seen.insert(trace_[use].unit).second) first_uses.push_back(use);
    }
    const auto ahead = static_cast<std::size_t>(window_.inter);
    for (std::size_t i = 0; i < first_uses.size(); ++i) {
      const std::size_t at = ahead == 0 ? first_uses[i] : i >= ahead ? first_uses[i - ahead] : 0;
      slots_[at].inter.push_back(maker_.publish_inter(trace_[first_uses[i]].unit));
    }
  }

  void publish_intra() {
    for (std::size_t use = 0; use < uses_.size(); ++use) {
      const Operation operation = maker_.publish_intra(trace_[uses_[use]].unit);
      slots_[place(use, window_.intra)].intra.push_back(operation);
    }
  }

  void serve_triggers() {
    std::set<int> later_releases;
    std::vector<bool> last(trace_.size(), false);
    for (std::size_t i = trace_.size(); i-- > 0;) {
      if (trace_[i].moment == Moment::kAfterBackward)
        last[i] = later_releases.insert(trace_[i].unit).second;
    }
    for (std::size_t i = 0; i < trace_.size(); ++i) {
      const int unit = trace_[i].unit;
      Slot& slot = slots_[i];
      switch (trace_[i].moment) {
        case Moment::kBeforeUse:
          slot.after = {maker_.await_weights(unit)};
          if (pass_ != Pass::kBackward) slot.after.push_back({Kind::kForward, unit, 0, {}});
          break;
        case Moment::kAfterForward:
          slot.before = {maker_.reshard(unit)};
          break;
        case Moment::kAfterBackward:
          slot.before = {{Kind::kBackward, unit, 0, {}}, maker_.reshard(unit)};
          if (last[i]) route(unit, options_.broadcast_before_reduce ? slot.after : slot.before);
          break;
      }
    }
  }

  void route(int unit, std::vector<Operation>& to) {
    while (window_.routes > 0 && static_cast<int>(in_flight_.size()) >= window_.routes)
      to.push_back(finish_oldest());
    const std::vector<Operation> operations = maker_.route(unit, sync_);
    to.insert(to.end(), operations.begin(), operations.end());
    in_flight_.push_back(unit);
    if (window_.routes == 0) to.push_back(finish_oldest());
  }

  Operation finish_oldest() {
    const int unit = in_flight_.front();
    in_flight_.pop_front();
    return maker_.finish_route(unit, sync_);
  }

  Maker maker_;
  const Trace& trace_;
  Pass pass_;
  const Options& options_;
  bool sync_;
  Window window_;
  std::vector<Slot> slots_;        // [triggers]
  std::vector<std::size_t> uses_;  // places of kBeforeUse
  std::deque<int> in_flight_;      // units whose route is not finished
};

void check_units(const Layout& layout, const Trace& trace) {
  for (const Trigger& trigger : trace) {
    core::require(trigger.unit >= 0 && trigger.unit < static_cast<int>(layout.units.size()),
                  "build_step_schedule: trace: expected units below ", layout.units.size(),
                  ", got ", trigger.unit);
  }
}

}  // namespace

const char* name_of(Kind kind) {
  static constexpr const char* kNames[kNumKinds] = {
      "update",   "publish inter", "publish intra", "await weights", "forward",
      "backward", "reshard",       "route intra",   "route inter",   "finish route"};
  return kNames[static_cast<int>(kind)];
}

const char* name_of(Lane lane) {
  static constexpr const char* kNames[] = {"compute", "intra", "inter"};
  return kNames[static_cast<int>(lane)];
}

Lane lane_of(Kind kind) {
  if (kind == Kind::kPublishInter || kind == Kind::kRouteInter) return Lane::kInter;
  if (kind == Kind::kPublishIntra || kind == Kind::kRouteIntra) return Lane::kIntra;
  return Lane::kCompute;
}

std::int64_t UnitLayout::num_elements() const {
  return std::accumulate(owner_elements.begin(), owner_elements.end(), std::int64_t{0});
}

void check(const Options& options) {
  core::require(options.lookahead >= 0,
                "dedicate_params: lookahead: expected 0 or more units, got ", options.lookahead);
  core::require(options.max_units_in_flight == 0 || options.max_units_in_flight >= 2,
                "dedicate_params: max_units_in_flight: expected 2 or more, or None, got ",
                options.max_units_in_flight);
}

std::vector<Message> messages_of(const Operation& operation, const Layout& layout, int slot) {
  std::vector<Message> messages;
  if (lane_of(operation.kind) == Lane::kCompute) return messages;
  const UnitLayout& unit = layout.units.at(static_cast<std::size_t>(operation.unit));
  const int replicates = layout.num_replicates;
  const int shards = layout.num_shards;
  const bool publishes =
      operation.kind == Kind::kPublishInter || operation.kind == Kind::kPublishIntra;
  const auto add = [&](Message::Group group, int root, std::int64_t elements) {
    const int size = publishes ? unit.weight_size : unit.gradient_size;
    if (elements > 0) messages.push_back({group, root, elements * size});
  };
  const auto part = [&](int replicate, int shard) {
    const int owner = replicate * shards + shard;
    return unit.owner_elements.at(static_cast<std::size_t>(owner));
  };
  if (lane_of(operation.kind) == Lane::kInter) {
    for (int replicate = 0; replicates > 1 && replicate < replicates; ++replicate)
      add(Message::Group::kColumn, replicate, part(replicate, slot % shards));
    return messages;
  }
  for (int shard = 0; shards > 1 && shard < shards; ++shard) {
    std::int64_t elements = 0;
    for (int replicate = 0; replicate < replicates; ++replicate) elements += part(replicate, shard);
    add(Message::Group::kRow, shard, elements);
  }
  return messages;
}

PassSchedule build_pass_schedule(const Layout& layout, const Trace& trace, const Trace& forward,
                                 Pass pass, const Options& options, bool sync) {
  check(options);
  check_units(layout, trace);
  return PassBuilder(layout, trace, forward, pass, options, sync).take();
}

std::vector<Operation> build_update_schedule(const Layout& layout, const Trace& forward,
                                             const std::vector<std::vector<int>>& batches,
                                             const Options& options) {
  check(options);
  check_units(layout, forward);
  const Maker maker(layout);
  const Window window = window_of(layout, options);
  std::vector<Operation> operations;
  // What is left of the old version must not be taken for the new one.
  for (std::size_t unit = 0; unit < layout.units.size(); ++unit)
    operations.push_back(maker.reshard(static_cast<int>(unit)));

  std::vector<bool> updated(batches.size(), false);
  const auto update = [&](auto&& touches) {
    for (std::size_t batch = 0; batch < batches.size(); ++batch) {
      if (updated[batch] || !touches(batches[batch])) continue;
      updated[batch] = true;
      operations.push_back({Kind::kUpdate, static_cast<int>(batch), 1, {}});
    }
  };
  const auto add = [&](Operation operation) {
    operation.version = 1;
    operations.push_back(std::move(operation));
  };
  const std::vector<int> units = units_by_first_use(forward);
  std::size_t ahead = static_cast<std::size_t>(window.inter);
  if (!options.asynchronous && options.node_copy) ahead = units.size();
  if (!maker.has_inter()) ahead = static_cast<std::size_t>(window.intra);
  for (std::size_t i = 0; i < std::min(units.size(), ahead); ++i) {
    update([&](const std::vector<int>& touched) {
      return std::find(touched.begin(), touched.end(), units[i]) != touched.end();
    });
    if (maker.has_inter()) add(maker.publish_inter(units[i]));
    if (i == 0 && window.intra > 0) add(maker.publish_intra(units[i]));
  }
  update([](const std::vector<int>&) { return true; });
  return operations;
}

StepSchedule build_step_schedule(const Layout& layout, const Trace& forward, const Trace& backward,
                                 const std::vector<std::vector<int>>& batches,
                                 const Options& options) {
  const auto back = [&](bool sync) {
    return build_pass_schedule(layout, backward, forward, Pass::kBackward, options, sync);
  };
  return {build_pass_schedule(layout, forward, forward, Pass::kTrainForward, options), back(true),
          back(false), build_update_schedule(layout, forward, batches, options)};
}

std::vector<Operation> serve_on_demand(const Layout& layout, Trigger trigger, bool sync) {
  const Maker maker(layout);
  std::vector<Operation> operations;
  switch (trigger.moment) {
    case Moment::kBeforeUse:
      if (maker.has_inter()) operations.push_back(maker.publish_inter(trigger.unit));
      operations.push_back(maker.publish_intra(trigger.unit));
      operations.push_back(maker.await_weights(trigger.unit));
      break;
    case Moment::kAfterForward:
      operations.push_back(maker.reshard(trigger.unit));
      break;
    case Moment::kAfterBackward:
      operations.push_back(maker.reshard(trigger.unit));
      for (Operation& stage : maker.route(trigger.unit, sync))
        operations.push_back(std::move(stage));
      operations.push_back(maker.finish_route(trigger.unit, sync));
      break;
  }
  return operations;
}

std::uint64_t StepSchedule::hash() const {
  core::Hasher hasher;
  const auto add = [&](const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) {
      if (operation.kind == Kind::kUpdate) continue;
      hasher.add(static_cast<std::int64_t>(operation.kind)).add(std::int64_t{operation.unit});
    }
    hasher.add(std::int64_t{-1});
  };
  for (const PassSchedule* pass : {&forward, &backward, &backward_no_sync}) {
    for (const std::vector<Operation>& operations : pass->at) add(operations);
    add(pass->end);
  }
  add(step);
  return hasher.value();
}

}  // namespace dmuon::schedule
