#include "dmuon/schedule/step_schedule.h"

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"
#include "dmuon/schedule/maker.h"

namespace dmuon::schedule {

void check(const StepOptions& options, std::string_view function) {
  core::require(0 <= options.lookahead && options.lookahead <= kMostUnits, function,
                ": lookahead: expected 0 to ", kMostUnits, " units, got ", options.lookahead);
  const int most = options.max_units_in_flight;
  core::require(most == 0 || (2 <= most && most <= kMostUnits), function,
                ": max_units_in_flight: expected 2 to ", kMostUnits,
                " units, or none for lookahead + 2, got ", most);
  core::require(!options.replicated || (!options.node_copy && !options.reshard_after_forward),
                function, ": replicated: expected node_copy and reshard_after_forward false with ",
                "it, got node_copy ", options.node_copy, " and reshard_after_forward ",
                options.reshard_after_forward);
}

namespace {

bool touches(const std::vector<core::UnitIndex>& touched, core::UnitIndex unit) {
  return std::find(touched.begin(), touched.end(), unit) != touched.end();
}

// All batches: first those that complete the first unit, and so on.
std::vector<core::BatchIndex> batches_by_unit(const Batches& batches,
                                              const std::vector<core::UnitIndex>& units) {
  return core::sorted_by(batches.indices(), [&](core::BatchIndex batch) {
    return std::find_if(units.begin(), units.end(),
                        [&](core::UnitIndex unit) { return touches(batches[batch], unit); });
  });
}

}  // namespace

std::vector<Operation> build_update_schedule(const Layout& layout, const Batches& batches,
                                             const Trace& forward, const StepOptions& options) {
  const Maker maker(layout, batches);
  const Window window = window_of(layout, options);
  std::vector<Operation> operations;
  // Drop old copies, so that nobody mistakes them for the new version.
  for (const core::UnitIndex unit : layout.units.indices()) {
    if (!layout.units[unit].empty()) operations.push_back(maker.reshard(unit));
  }

  std::vector<core::UnitIndex> units = units_by_first_use(layout, forward);
  std::size_t ahead = static_cast<std::size_t>(window.inter);
  // Node copies wait for nothing: the slow links have all of the next forward.
  if (options.node_copy && window.inter > 0) ahead = units.size();
  if (!maker.has_inter()) ahead = static_cast<std::size_t>(window.intra);
  if (options.replicated) ahead = units.size();  // their buffers are there in any case
  std::vector<core::BatchIndex> left = batches_by_unit(batches, units);
  units.resize(std::min(units.size(), ahead));
  for (Operation& operation : maker.updates(left)) operations.push_back(std::move(operation));
  if (options.late_updates) left.clear();
  const auto add = [&](Operation operation) {
    operation.version = 1;
    operations.push_back(std::move(operation));
  };
  for (std::size_t i = 0; i < units.size(); ++i) {
    std::erase_if(left, [&](core::BatchIndex batch) {
      const bool completes = touches(batches[batch], units[i]);
      if (completes) add(Maker::finish_update(batch));
      return completes;
    });
    if (maker.has_inter()) add(maker.publish_inter(units[i]));
    if (options.replicated || (i == 0 && window.intra > 0)) add(maker.publish_intra(units[i]));
  }
  for (const core::BatchIndex batch : left) add(Maker::finish_update(batch));
  return operations;
}

StepSchedule build_step_schedule(const Layout& layout, const Batches& batches, const Trace& forward,
                                 const Trace& evaluation, const Trace& backward,
                                 const StepOptions& options) {
  check(options);
  for (const Trace* trace : {&forward, &evaluation, &backward}) {
    for (const Trigger& trigger : *trace) {
      core::require(layout.units.contains(trigger.unit),
                    "build_step_schedule: traces: expected units below ", layout.units.size(),
                    ", got ", trigger.unit);
    }
  }
  const auto forward_of = [&](const Trace& trace, Pass pass) {
    return build_pass_schedule(layout, batches, trace, trace, pass, options);
  };
  const auto backward_of = [&](bool sync) {
    return build_pass_schedule(layout, batches, backward, forward, Pass::kBackward, options, sync);
  };
  return {forward_of(forward, Pass::kTrainForward), forward_of(evaluation, Pass::kEvalForward),
          backward_of(true), backward_of(false),
          build_update_schedule(layout, batches, forward, options)};
}

std::vector<Operation> serve_on_demand(const Layout& layout, const Maker& maker, Trigger trigger,
                                       bool sync) {
  std::vector<Operation> operations;
  if (layout.units[trigger.unit].empty()) return operations;
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
      operations.push_back(maker.finish_route_intra(trigger.unit));
      if (maker.has_inter() && sync) operations.push_back(maker.finish_route_inter(trigger.unit));
      break;
  }
  return operations;
}

std::uint64_t StepSchedule::hash() const {
  core::Hasher hasher;
  const auto add = [&](const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) {
      if (is_on_batch(operation.kind)) continue;
      hasher.add(static_cast<std::int64_t>(operation.kind))
          .add(std::int64_t{operation.unit().value()});
    }
    hasher.add(std::int64_t{-1});
  };
  for (const PassSchedule* pass : {&forward, &evaluation, &backward, &backward_no_sync}) {
    for (const std::vector<Operation>& operations : *pass) add(operations);
    hasher.add(std::int64_t{-2});
  }
  add(step);
  return hasher.value();
}

}  // namespace dmuon::schedule
