#include "dmuon/engine/executor.h"

#include <c10/core/GradMode.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::engine {

using schedule::Kind;
using schedule::Operation;

Executor::Executor(Options options, Groups groups, std::vector<MatrixSpec> specs,
                   const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& batches)
    : options_(options),
      groups_(std::move(groups)),
      specs_(std::move(specs)),
      pool_(std::make_shared<BufferPool>(options.device)),
      places_(specs_.size()),
      has_gradient_(specs_.size(), false),
      process_(getpid()) {
  for (const UnitSpec& spec : units) {
    UnitState state;
    state.unit = std::make_unique<Unit>(
        spec.name, specs_,
        pack(specs_, spec.matrices, options_.num_replicates, options_.num_shards), pool_,
        spec.compute_dtype, spec.reduce_dtype);
    state.partial_filled.assign(spec.matrices.size(), false);
    if (options_.schedule.node_copy && has_inter()) {
      state.node_copy =
          std::make_unique<PackedBuffer>(pool_, own_column(state).size(), spec.compute_dtype);
      state.node_copy->allocate();
    }
    states_.push_back(std::move(state));
  }
  for (const std::vector<int>& batch : batches) {
    const MatrixSpec& first = specs_.at(static_cast<std::size_t>(batch.at(0)));
    for (std::size_t i = 0; i < batch.size(); ++i) {
      core::invariant(is_owner(batch[i]), "Engine: matrix ", batch[i], " is in a batch of slot ",
                      options_.slot(), " and owned by slot ",
                      specs_[static_cast<std::size_t>(batch[i])].owner);
      places_[static_cast<std::size_t>(batch[i])] = {static_cast<int>(batches_.size()), i};
    }
    batches_.emplace_back(batch, first.rows, first.cols, options_.device);
    pool_->count(batches_.back().num_bytes());
  }
}

void Groups::leave(std::chrono::milliseconds grace) {
  const Event ends[] = {lanes->intra.enqueue(c10::kCPU, [] {}, {}),
                        lanes->inter.enqueue(c10::kCPU, [] {}, {})};
  bool over = true;
  for (const Event& end : ends) over = end.wait_for(grace) && over;
  if (over) return;
  row.give_up();
  column.give_up();
}

// What travels uses this object's buffers.
Executor::~Executor() {
  if (getpid() != process_) return;
  for (const UnitState& state : states_) {
    for (const Event& event : state.done) {
      try {
        event.wait();
      } catch (const std::exception&) {  // a lost peer: whoever waited for this has heard of it
      }
    }
  }
}

schedule::Layout Executor::layout() const {
  schedule::Layout layout{options_.num_replicates, options_.num_shards, {}};
  for (const UnitState& state : states_) {
    schedule::UnitLayout unit{.name = state.unit->name()};
    for (const Segment& part : state.unit->packing().owners)
      unit.owner_elements.push_back(part.size());
    unit.weight_size = static_cast<int>(state.unit->weights().flat().element_size());
    unit.gradient_size = static_cast<int>(state.unit->gradients().flat().element_size());
    layout.units.push_back(std::move(unit));
  }
  return layout;
}

schedule::Batches Executor::units_of_batches() const {
  schedule::Batches touched;
  for (const OwnedBatch& batch : batches_) {
    std::vector<core::UnitIndex> units;
    for (const int matrix : batch.matrices)
      units.emplace_back(specs_[static_cast<std::size_t>(matrix)].unit);
    touched.push_back(std::move(units));
  }
  return touched;
}

// ---- operations ----

void Executor::enqueue(const Operation& operation, std::function<void()> work) {
  const bool intra = schedule::lane_of(operation.kind) == schedule::Lane::kIntra;
  std::vector<Event> after;
  for (const schedule::Dependency& dependency : operation.after)
    after.push_back(newest(dependency));
  const auto timed = [this, kind = operation.kind, unit = operation.unit.value(),
                      issued = Profile::now(), work = std::move(work)] {
    const double started = Profile::now();
    work();
    profile_.add({kind, unit, issued, started, Profile::now()});
  };
  Lane& queue = intra ? groups_.lanes->intra : groups_.lanes->inter;
  states_[operation.unit].done[static_cast<std::size_t>(operation.kind)] =
      queue.enqueue(options_.device, timed, std::move(after));
}

void Executor::await(const Operation& operation) {
  const double started = Profile::now();
  for (const schedule::Dependency& dependency : operation.after) newest(dependency).wait();
  profile_.add({operation.kind, operation.unit.value(), started, started, Profile::now()});
}

void Executor::perform(const Operation& operation, const std::function<void(int)>& update) {
  if (operation.kind == Kind::kUpdate) {
    const double started = Profile::now();
    if (update) update(operation.batch.value());
    profile_.add({operation.kind, operation.batch.value(), started, started, Profile::now()});
    return;
  }
  const c10::AutoGradMode no_grad(false);
  UnitState& state = states_.at(operation.unit);
  switch (operation.kind) {
    case Kind::kPublishInter:
      return publish_inter(state, operation);
    case Kind::kPublishIntra:
      return publish_intra(state, operation);
    case Kind::kAwaitWeights:
      return await(operation);
    case Kind::kReshard:
      return reshard(state, operation);
    case Kind::kRouteIntra:
      return route_intra(state, operation);
    case Kind::kRouteInter:
      return route_inter(state, operation);
    case Kind::kFinishRoute:
      return finish_route(state, operation);
    case Kind::kUpdate:
    case Kind::kForward:
    case Kind::kBackward:
      return;  // the module's own affair
  }
}

void Executor::drain() {
  for (const UnitState& state : states_) {
    for (const Event& event : state.done) event.wait();
  }
}

void Executor::clear_gradient(int matrix) {
  has_gradient_.at(static_cast<std::size_t>(matrix)) = false;
  const Place& place = places_[static_cast<std::size_t>(matrix)];
  if (place.batch >= 0) batches_[static_cast<std::size_t>(place.batch)].filled[place.index] = false;
  UnitState& state = states_[core::UnitIndex(specs_[static_cast<std::size_t>(matrix)].unit)];
  const std::vector<int>& matrices = state.unit->packing().matrices;
  const auto found = std::find(matrices.begin(), matrices.end(), matrix) - matrices.begin();
  state.partial_filled[static_cast<std::size_t>(found)] = false;
}

std::map<std::string, double> Executor::statistics() const {
  std::map<std::string, double> all = profile_.seconds();
  double copies = 0;
  for (const UnitState& state : states_)
    copies += static_cast<double>(state.unit->num_gradient_copies());
  all["gradient_copies"] = copies;
  all["unshards"] = static_cast<double>(num_unshards_);
  all["routes"] = static_cast<double>(num_routes_);
  all["current_bytes"] = static_cast<double>(pool_->current_bytes());
  all["peak_bytes"] = static_cast<double>(pool_->peak_bytes());
  all["messages_intra"] = static_cast<double>(groups_.row.traffic().num_messages);
  all["messages_inter"] = static_cast<double>(groups_.column.traffic().num_messages);
  all["bytes_sent_intra"] = static_cast<double>(groups_.row.traffic().num_bytes);
  all["bytes_sent_inter"] = static_cast<double>(groups_.column.traffic().num_bytes);
  return all;
}

}  // namespace dmuon::engine
