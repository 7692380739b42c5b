#include "dmuon/schedule/resolver.h"

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::schedule {

namespace {

std::vector<bool> host_units(const Layout& layout) {
  std::vector<bool> host;
  for (const UnitLayout& unit : layout.units) host.push_back(unit.host);
  return host;
}

}  // namespace

Resolver::Resolver(Layout layout, const StepOptions& options, Batches batches, Performer* performer)
    : layout_(std::move(layout)),
      options_(options),
      batches_(std::move(batches)),
      performer_(performer),
      maker_(layout_, batches_),
      order_(host_units(layout_)),
      units_(layout_.units.size()) {
  for (const UnitLayout& unit : layout_.units) has_host_ |= unit.host;
  rebuild_schedule();
}

// ---- what hooks say ----

void Resolver::begin_forward(bool training, bool whole) {
  settle();
  whole_forward_ = whole;
  forget_uses();
  if (training) forward_sync_ = sync_;
  // A backward that only this rank left out would leave the others in the host framework's
  // collectives, and this forward would begin the next ones.
  if (has_host_ && order_.unanswered()) performer_->compare(std::nullopt);
  cross(order_.begin_forward(training));
}

// Request the first use even if the unit is ready. The trace must not depend on what the previous
// pass left behind, which differs between options. The schedule may wait for a later use to send
// the next units. No forward's use of a host unit may be left out: when the host framework goes on,
// all ranks must have crossed the same triggers.
void Resolver::before_use(core::UnitIndex unit) {
  const Trigger trigger{Moment::kBeforeUse, unit};
  const bool used = units_.at(unit).used;
  const bool there = layout_.units[unit].empty() || ready(unit);
  const bool host = layout_.units[unit].host && order_.current() != Pass::kBackward;
  if (!used || !there || host || order_.is_next(trigger)) request(trigger);
}

void Resolver::request(Trigger trigger) { cross(order_.request(trigger, whole_forward_)); }

void Resolver::after_forward(core::UnitIndex unit) {
  const Trigger trigger{Moment::kAfterForward, unit};
  if (!options_.reshard_after_forward || !ready(unit)) return;
  // A replay that does not owe it keeps the unit for the backward that follows.
  if (order_.on_demand() || order_.owes(trigger)) request(trigger);
}

void Resolver::begin_backward() {
  settle();
  forget_uses();
  issued_.add(std::int64_t{sync_});
  cross(order_.begin_backward());
}

void Resolver::before_backward(core::UnitIndex unit) {
  before_use(unit);
  finish_stage_1(unit);  // its gradients lie where new ones come
}

void Resolver::before_gradient(core::UnitIndex unit) {
  finish_stage_1(unit);
  units_.at(unit).owes_route = true;
}

void Resolver::after_backward(core::UnitIndex unit) {
  if (order_.current() != Pass::kBackward) return;
  request({Moment::kAfterBackward, unit});
}

// A unit that is still open after everything that the trace owes is a deviation. Deviations come
// last, so that ranks that skipped something deviate at the same place. They follow from crossed
// triggers, so that ranks without gradients deviate too. Units that an evaluation left open are not
// this pass's.
void Resolver::end_backward() {
  order_.begin_end();
  confirm_end();
  cross(order_.catch_up());
  for (int i = units_.size(); i-- > 0;) {
    const Progress& unit = units_[core::UnitIndex(i)];
    const bool open = unit.ready && (unit.used || unit.trained);
    if (open || unit.owes_route) request({Moment::kAfterBackward, core::UnitIndex(i)});
  }
  end_pass();
  for (Progress& unit : units_) unit.trained = false;
  if (has_host_) performer_->leave_to_host(std::nullopt);
}

// Compares the end of the pass on all ranks, because the host framework's collectives must match.
void Resolver::confirm_end() {
  if (!order_.owes_host_use()) return;
  cross(order_.catch_up_to_host_use());
  performer_->compare(std::nullopt);
}

void Resolver::end_pass() {
  if (!order_.current()) return;
  const bool traced = order_.on_demand();
  if (traced) performer_->compare(std::nullopt);
  confirm_end();
  cross(order_.end_pass());
  if (traced) rebuild_schedule();
}

void Resolver::settle() {
  if (order_.current() == Pass::kBackward) {
    end_backward();
  } else {
    end_pass();
  }
  finish_routes();
}

void Resolver::settle_step() {
  settle();
  const bool sync = sync_;
  if (order_.owes_backward()) {
    sync_ = forward_sync_;
    begin_backward();
    end_backward();
  }
  sync_ = true;
  for (const core::UnitIndex unit : units_.indices()) {
    if (units_[unit].held) serve({Moment::kAfterBackward, unit});
  }
  sync_ = sync;
  finish_routes();
}

void Resolver::renew(bool updates) {
  settle();
  ++version_;
  for (const Operation& operation : schedule_.step) {
    if (updates || !is_on_batch(operation.kind)) resolve(operation);
  }
}

void Resolver::finish_routes() {
  while (!routes_.empty()) finish_stage_2(routes_.front());
}

bool Resolver::holds_partial_sums() const {
  return std::any_of(units_.begin(), units_.end(), [](const Progress& unit) { return unit.held; });
}

// ---- from triggers to operations ----

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
  for (Progress& unit : units_) unit.used = false;
}

void Resolver::cross(const std::vector<Crossing>& crossings) {
  for (const Crossing& crossing : crossings) {
    const Trigger& trigger = crossing.trigger;
    Progress& unit = units_.at(trigger.unit);
    const bool empty = layout_.units[trigger.unit].empty();
    if (trigger.moment == Moment::kBeforeUse) {
      unit.used = true;
      unit.trained |= crossing.pass == Pass::kTrainForward;
      unit.owes_route |= crossing.pass == Pass::kBackward && !empty;
    } else if (empty) {
      unit.used = false;
    }
    if (crossing.compare()) performer_->compare(trigger);
    issued_.add(static_cast<std::int64_t>(trigger.moment)).add(std::int64_t{trigger.unit.value()});
    crossing_ = crossing;
    if (crossing.compare()) {
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
  if (is_on_batch(operation.kind)) return performer_->perform(operation);
  Progress& unit = units_.at(operation.unit());
  switch (operation.kind) {
    case Kind::kPublishInter:
      if (unit.part == version_) return;
      performer_->perform(operation);
      unit.part = version_;
      unit.part_awaited = false;
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
      unit.ready = unit.part_awaited = true;
      return;
    case Kind::kReshard:
      return reshard(&unit, operation);
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
    case Kind::kOrthogonalise:
    case Kind::kApply:
    case Kind::kFinishUpdate:
      break;  // above
  }
}

void Resolver::reshard(Progress* unit, const Operation& operation) {
  if (!unit->filled && unit->part_awaited) return;
  unit->ready = false;  // whatever happens, nobody computes with half of it
  performer_->perform(operation);
  unit->filled = false;
  unit->part_awaited = true;
  if (!options_.node_copy) unit->part = kNone;
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
