#include "dmuon/schedule/resolver.h"

#include <algorithm>
#include <utility>

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

// ---- what hooks say; resolve.cpp has the operations that follow ----

void Resolver::begin_forward(bool training, bool whole) {
  settle();
  forget_uses();
  if (training) forward_sync_ = sync_;
  // A backward that only this rank left out would leave the others in the host framework's
  // collectives, and this forward would begin the next ones.
  if (has_host_ && order_.unanswered()) performer_->compare(std::nullopt);
  order_.begin_forward(training, whole);
  if (has_host_) performer_->leave_before_forward();
}

// Request the first use even if the unit is ready. The trace must not depend on what the previous
// pass left behind, which differs between options. The schedule may wait for a later use to send
// the next units. No forward's use of a host unit may be left out: when the host framework goes on,
// all ranks must have crossed the same triggers. Nor may a read, because only their number tells
// one use from the next.
void Resolver::before_use(core::UnitIndex unit, bool reader) {
  const Trigger trigger{Moment::kBeforeUse, unit};
  const bool used = units_.at(unit).used;
  const bool there = layout_.units[unit].empty() || ready(unit);
  const bool host = layout_.units[unit].host && order_.current() != Pass::kBackward;
  order_.forget_end(unit);
  if (reader) end_reads(kMostRead - 1);
  if (!used || !there || host || reader || order_.is_next(trigger)) request(trigger);
}

void Resolver::after_read(Trigger end) {
  if (end.moment == Moment::kAfterBackward || options_.reshard_after_forward) order_.note_end(end);
}

// Ends the uses that were noted first, until so many remain.
void Resolver::end_reads(std::size_t remaining) {
  std::vector<Trigger> noted = order_.noted_ends();
  if (noted.size() <= remaining) return;
  noted.resize(noted.size() - remaining);
  for (const Trigger& end : noted) cross({order_.cross_noted(end)});
}

void Resolver::end_forward() {
  end_reads(0);
  order_.end_forward();
}

// A trace may end a use before what comes next. If the use is still open here, as where this pass
// reads other units inside of it, the pass goes otherwise than the trace.
void Resolver::request(Trigger trigger) {
  if (order_.repeats(trigger) && !any_in_use()) {
    end_reads(0);
    if (order_.keep_period()) begin_forward(/*training=*/false);
  }
  const std::vector<Trigger> owed = order_.owed_before(trigger);
  const auto frees_used = std::find_if(owed.begin(), owed.end(), [&](const Trigger& each) {
    return each.moment != Moment::kBeforeUse && units_.at(each.unit).in_use;
  });
  if (frees_used != owed.end()) cross(order_.deviate_before(*frees_used));
  cross(order_.request(trigger));
}

void Resolver::after_forward(core::UnitIndex unit) {
  const Trigger trigger{Moment::kAfterForward, unit};
  order_.forget_end(unit);
  if (!options_.reshard_after_forward || !ready(unit)) return;
  // A replay that does not owe it keeps the unit for the backward that follows.
  if (order_.on_demand() || order_.owes(trigger)) request(trigger);
}

void Resolver::begin_backward(bool keeps_weights) {
  settle();
  finish_update();  // which reads the gradients that routes change
  forget_uses();
  keeps_weights_ = keeps_weights;
  issued_.add(std::int64_t{sync_}).add(std::int64_t{keeps_weights});
  order_.begin_backward();
  num_crossed_ = 0;
}

void Resolver::before_backward(core::UnitIndex unit, bool reader) {
  before_use(unit, reader);
  finish_stage_1(unit);  // its gradients lie where new ones come
}

void Resolver::before_gradient(core::UnitIndex unit) {
  finish_stage_1(unit);
  units_.at(unit).owes_route = true;
  order_.renew_note({Moment::kAfterBackward, unit});
}

void Resolver::after_backward(core::UnitIndex unit) {
  if (order_.current() != Pass::kBackward) return;
  order_.forget_end(unit);
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
  end_reads(0);
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
  end_reads(0);
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

void Resolver::run_owed_backward() {
  const bool sync = std::exchange(sync_, forward_sync_);
  begin_backward();
  end_backward();
  sync_ = sync;
}

void Resolver::settle_step(const std::function<void(bool)>& after_owed) {
  settle();
  finish_update();
  if (order_.owes_backward()) {
    run_owed_backward();
    after_owed(forward_sync_);
  }
  const bool sync = std::exchange(sync_, true);
  for (const core::UnitIndex unit : units_.indices()) {
    if (units_[unit].held) serve({Moment::kAfterBackward, unit});
  }
  sync_ = sync;
  finish_routes();
}

void Resolver::renew(bool updates) {
  settle();
  finish_update();
  ++version_;
  for (const Operation& operation : schedule_.step) {
    if (operation.kind == Kind::kReshard) {
      reshard(&units_.at(operation.unit()), operation);
    } else if (updates || !is_on_batch(operation.kind)) {
      resolve(operation);
    }
  }
}

void Resolver::free_weights() {
  settle();
  finish_update();
  for (const core::UnitIndex unit : units_.indices()) {
    if (!layout_.units[unit].empty()) reshard(&units_[unit], maker_.reshard(unit));
  }
}

void Resolver::finish_update() {
  while (!updates_.empty()) resolve(Maker::finish_update(updates_.front()));
}

void Resolver::finish_routes() {
  while (!routes_.empty()) finish_stage_2(routes_.front());
}

bool Resolver::may_begin_training() const {
  return order_.current() == Pass::kEvalForward && !order_.has_end() && !any_in_use();
}

bool Resolver::any_in_use() const {
  return std::any_of(units_.begin(), units_.end(),
                     [](const Progress& unit) { return unit.in_use; });
}

bool Resolver::holds_partial_sums() const {
  return std::any_of(units_.begin(), units_.end(), [](const Progress& unit) { return unit.held; });
}

}  // namespace dmuon::schedule
