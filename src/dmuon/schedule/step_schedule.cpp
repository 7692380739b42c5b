#include "dmuon/schedule/step_schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/schedule/maker.h"

namespace dmuon::schedule {

std::vector<int> units_by_first_use(const Trace& trace) {
  std::vector<int> units;
  for (const Trigger& trigger : trace) {
    const bool known = std::find(units.begin(), units.end(), trigger.unit) != units.end();
    if (trigger.moment == Moment::kBeforeUse && !known) units.push_back(trigger.unit);
  }
  return units;
}

void check_units(const Layout& layout, const Trace& trace) {
  for (const Trigger& trigger : trace) {
    core::require(trigger.unit >= 0 && trigger.unit < static_cast<int>(layout.units.size()),
                  "build_step_schedule: trace: expected units below ", layout.units.size(),
                  ", got ", trigger.unit);
  }
}

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
