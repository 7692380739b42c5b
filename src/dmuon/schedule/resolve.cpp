// The resolver, from triggers to operations: what each needs, and what has been done already.

#include "dmuon/schedule/resolver.h"

namespace dmuon::schedule {

// Passes are traced one after the other. The parts that a new trace does not touch stay as they
// are.
void Resolver::rebuild_schedule() {
  schedule_ = build_step_schedule(layout_, batches_, order_.trace(Pass::kTrainForward),
                                  order_.trace(Pass::kEvalForward), order_.trace(Pass::kBackward),
                                  options_);
  issued_.add(static_cast<std::int64_t>(schedule_.hash()));
}

const PassSchedule& Resolver::schedule_of(Pass pass) const {
  switch (pass) {
    case Pass::kTrainForward:
      return schedule_.forward;
    case Pass::kEvalForward:
      return schedule_.evaluation;
    case Pass::kBackward:
      break;
  }
  return sync_ ? schedule_.backward : schedule_.backward_no_sync;
}

void Resolver::forget_uses() {
  for (Progress& unit : units_) unit.used = unit.in_use = false;
}

void Resolver::cross(const std::vector<Crossing>& crossings) {
  for (const Crossing& crossing : crossings) {
    const Trigger& trigger = crossing.trigger;
    if (crossing.pass == Pass::kBackward) {
      if (sync_) performer_->before_crossing(num_crossed_);
      ++num_crossed_;
    }
    Progress& unit = units_.at(trigger.unit);
    const bool empty = layout_.units[trigger.unit].empty();
    if (trigger.moment == Moment::kBeforeUse) {
      unit.used = true;
      unit.trained |= crossing.pass == Pass::kTrainForward;
      unit.owes_route |= crossing.pass == Pass::kBackward && !empty;
    } else if (empty) {
      unit.used = false;
    }
    if (crossing.is_compared()) performer_->compare(trigger);
    issued_.add(static_cast<std::int64_t>(trigger.moment)).add(std::int64_t{trigger.unit.value()});
    crossing_ = crossing;
    if (crossing.is_compared()) {
      serve(trigger);
    } else {
      const auto position = static_cast<std::size_t>(crossing.position);
      for (const Operation& operation : schedule_of(crossing.pass).at(position)) resolve(operation);
    }
    crossing_.reset();
    if (trigger.moment != Moment::kAfterForward && layout_.units[trigger.unit].host)
      performer_->leave_to_host(trigger);
  }
}

void Resolver::serve(Trigger trigger) {
  for (const Operation& operation : serve_on_demand(layout_, maker_, trigger, sync_))
    resolve(operation);
}

void Resolver::resolve(const Operation& operation) {
  if (is_on_batch(operation.kind)) {
    performer_->perform(operation);
    if (operation.kind == Kind::kApply) updates_.push_back(operation.batch());
    if (operation.kind == Kind::kFinishUpdate) std::erase(updates_, operation.batch());
    return;
  }
  Progress& unit = units_.at(operation.unit());
  switch (operation.kind) {
    case Kind::kPublishInter:
      if (unit.stage_1 == version_) return;
      performer_->perform(operation);
      unit.stage_1 = version_;
      unit.stage_1_awaited = false;
      return;
    case Kind::kPublishIntra:
      if (unit.filled) return;
      if (maker_.has_inter()) {
        Operation stage_1 = maker_.publish_inter(operation.unit());
        stage_1.version = operation.version;
        resolve(stage_1);
      }
      performer_->perform(operation);
      unit.filled = true;
      return;
    case Kind::kAwaitWeights:
      if (unit.ready) return;
      performer_->perform(operation);
      unit.ready = unit.stage_1_awaited = true;
      return;
    case Kind::kReshard:
      return end_use(&unit, operation);
    case Kind::kRouteIntra:
      finish_stage_2(operation.unit());
      performer_->perform(operation);
      unit.in_stage_1 = true;
      unit.held = operation.hold;
      unit.owes_route = false;
      routes_.push_back(operation.unit());
      return;
    case Kind::kRouteInter:
      performer_->perform(operation);
      unit.in_stage_2 = true;
      return;
    case Kind::kFinishRouteIntra:
      return finish_stage_1(operation.unit());
    case Kind::kFinishRouteInter:
      return finish_stage_2(operation.unit());
    case Kind::kPrepare:
    case Kind::kGather:
    case Kind::kOrthogonalise:
    case Kind::kScatter:
    case Kind::kApply:
    case Kind::kFinishUpdate:
      break;  // above
  }
}

void Resolver::end_use(Progress* unit, const Operation& operation) {
  const bool keeps = keeps_weights_ && order_.current() == Pass::kBackward;
  if (!keeps && !options_.replicated) return reshard(unit, operation);
  unit->used = unit->trained = false;  // as if freed: whether a use is traced depends on it
}

void Resolver::reshard(Progress* unit, const Operation& operation) {
  if (!unit->filled && unit->stage_1_awaited) return;
  unit->ready = false;  // whatever happens, nobody computes with half of it
  performer_->perform(operation);
  unit->filled = false;
  unit->stage_1_awaited = true;
  if (!options_.node_copy) unit->stage_1 = kNone;
}

void Resolver::finish_stage_1(core::UnitIndex unit) {
  Progress& state = units_.at(unit);
  if (!state.in_stage_1) return;
  performer_->perform(maker_.finish_route_intra(unit));
  state.in_stage_1 = false;
  if (!state.in_stage_2) std::erase(routes_, unit);
}

void Resolver::finish_stage_2(core::UnitIndex unit) {
  finish_stage_1(unit);
  Progress& state = units_.at(unit);
  if (!state.in_stage_2) return;
  performer_->perform(maker_.finish_route_inter(unit));
  state.in_stage_2 = false;
  std::erase(routes_, unit);
}

}  // namespace dmuon::schedule
