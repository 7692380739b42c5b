#include "dmuon/engine/executor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <unistd.h>

#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/publish.h"
#include "dmuon/engine/route.h"

namespace dmuon::engine {

using schedule::Kind;
using schedule::Operation;

namespace {

Parameters parameters_of(const plan::Plan& plan, const SharedMesh& mesh) {
  core::invariant(plan.mesh == plan::Mesh{mesh.num_replicates(), mesh.num_shards()},
                  "Engine: plan: expected one for a mesh of ", mesh.num_replicates(), " x ",
                  mesh.num_shards());
  Parameters parameters;
  for (const core::ParameterIndex index : plan.inventory.indices()) {
    parameters.push_back({plan.inventory[index], plan.mesh.slot_of(plan.owner.at(index))});
  }
  return parameters;
}

std::vector<std::vector<core::ParameterIndex>> batches_of(const plan::Plan& plan, core::Slot slot) {
  std::vector<std::vector<core::ParameterIndex>> batches;
  for (const plan::Batch& batch : plan.batches) {
    if (plan.mesh.slot_of(batch.owner) != slot) continue;
    for (const core::ParameterIndex parameter : batch.parameters) {
      core::invariant(plan.owner.at(parameter) == batch.owner, "Engine: plan: parameter ",
                      parameter, " is in a batch of slot ", slot, " and owned by another");
    }
    batches.push_back(batch.parameters);
  }
  return batches;
}

}  // namespace

Executor::Executor(SharedMesh mesh, const plan::Plan& plan, const std::vector<UnitSpec>& units,
                   bool node_copy, c10::Device device, const LeafSizes& sizes)
    : mesh_(std::move(mesh)),
      parameters_(parameters_of(plan, mesh_)),
      leaves_(leaves_of(parameters_, sizes)),
      pool_(std::make_shared<BufferPool>(device)),
      owned_(parameters_, batches_of(plan, mesh_.slot()), pool_),
      profile_(device),
      process_(getpid()) {
  for (const UnitSpec& spec : units) {
    Packing packing = pack(parameters_, core::UnitIndex(states_.size()), mesh_.num_replicates(),
                           mesh_.num_shards());
    UnitState state;
    state.host = spec.host;
    state.partial_filled.resize(packing.parameters.size());
    state.has_gradient.resize(packing.parameters.size());
    if (node_copy && mesh_.has_inter() && !packing.parameters.empty()) {
      state.node_copy = std::make_unique<PackedBuffer>(
          pool_, packing.column_elements(mesh_.shard()), spec.compute_dtype);
      state.node_copy->allocate();
    }
    state.unit = std::make_unique<Unit>(spec.name, leaves_, std::move(packing), pool_,
                                        spec.compute_dtype, spec.reduce_dtype);
    states_.push_back(std::move(state));
  }
  for (const Parameter& parameter : parameters_) {
    core::invariant(states_.contains(parameter.unit_index()), "Engine: plan: expected units below ",
                    states_.size(), ", got ", parameter.unit);
  }
}

// What travels uses this object's buffers.
Executor::~Executor() {
  if (getpid() != process_) return;
  for (const UnitState& state : states_) {
    state.weights_used.wait();
    state.unit->await_gradients();
    for (const Event& event : state.done) {
      try {
        event.wait();
      } catch (const std::exception&) {  // a lost peer: whoever waited for this has heard of it
      }
    }
  }
}

schedule::Layout Executor::layout() const {
  schedule::Layout layout{mesh_.num_replicates(), mesh_.num_shards(), {}};
  for (const UnitState& state : states_) {
    schedule::UnitLayout unit;
    unit.name = state.unit->name();
    unit.host = state.host;
    for (const Part& part : state.packing().owners) unit.owner_elements.push_back(part.size());
    unit.kept_elements = state.packing().kept[mesh_.shard()].size();
    unit.weight_size = static_cast<int>(state.unit->weights().flat().element_size());
    unit.gradient_size = static_cast<int>(state.unit->gradients().flat().element_size());
    layout.units.push_back(std::move(unit));
  }
  return layout;
}

schedule::Batches Executor::units_of_batches() const {
  schedule::Batches touched;
  for (const OwnedBatch& batch : owned_.batches()) {
    std::vector<core::UnitIndex> units;
    for (const core::ParameterIndex parameter : batch.parameters)
      units.push_back(parameters_[parameter].unit_index());
    touched.push_back(std::move(units));
  }
  return touched;
}

// ---- operations ----

// The same on all ranks, which compare it.
std::string Executor::described(schedule::Kind kind, const Unit& unit) const {
  return schedule::name_of(kind) + (" of '" + unit.name()) + "' in step " + std::to_string(step_);
}

void Executor::enqueue(const Operation& operation, Work work) {
  const bool intra = schedule::lane_of(operation.kind) == schedule::Lane::kIntra;
  std::vector<Event> after;
  for (const schedule::Dependency& dependency : operation.after)
    after.push_back(newest(dependency));
  const auto timed = [this, of = operation.kind, unit = operation.unit.value(),
                      issued = profile_.clock().now(), work = std::move(work)] {
    const Instant started = profile_.clock().now();
    work();
    profile_.add({of, unit, issued, started, profile_.clock().now()});
  };
  const auto kind = static_cast<std::size_t>(operation.kind);
  UnitState& state = states_[operation.unit];
  std::string what = described(operation.kind, *state.unit);
  state.numbers[kind] = mesh_.watch->reach(Rendezvous::kOperation, what);
  Lane& queue = intra ? mesh_.lanes->intra : mesh_.lanes->inter;
  state.done[kind] = queue.enqueue(pool_->device(), timed, std::move(after));
  if (!pool_->device().is_cpu())
    mesh_.on_device->add({state.numbers[kind], std::move(what)}, state.done[kind], pool_->device());
}

void Executor::await(const Operation& operation) {
  const Instant started = profile_.clock().now();
  for (const schedule::Dependency& dependency : operation.after)
    finish(states_[dependency.unit], dependency.kind);
  profile_.add({operation.kind, operation.unit.value(), started, started, profile_.clock().now()});
}

// Waits for the unit's newest operation of the kind.
void Executor::finish(const UnitState& state, Kind kind) {
  const auto which = static_cast<std::size_t>(kind);
  finish(state.done[which], state.numbers[which], [&] { return described(kind, *state.unit); });
}

void Executor::finish(const Event& event, std::int64_t number,
                      const std::function<std::string()>& where) {
  mesh_.watch->wait(Rendezvous::kOperation, number, where, [&](std::chrono::milliseconds most) {
    if (!event.wait_for(most)) return false;
    event.wait();  // which throws what it threw
    return true;
  });
}

void Executor::drain_lanes() {
  for (Lane* lane : {&mesh_.lanes->intra, &mesh_.lanes->inter}) {
    finish(lane->enqueue(pool_->device(), [] {}, {}), mesh_.watch->num_operations(),
           [] { return std::string("all operations in flight"); });
  }
}

void Executor::perform(const Operation& operation,
                       const std::function<void(core::BatchIndex)>& update) {
  if (operation.kind == Kind::kUpdate) {
    const Instant started = profile_.clock().now();
    if (update) update(operation.batch);
    profile_.add(
        {operation.kind, operation.batch.value(), started, started, profile_.clock().now()});
    return;
  }
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  UnitState& state = states_.at(operation.unit);
  switch (operation.kind) {
    case Kind::kPublishInter:
      return enqueue(operation, publish_inter(&mesh_, &owned_, &state));
    case Kind::kPublishIntra:
      ++num_unshards_;
      return enqueue(operation, publish_intra(&mesh_, &owned_, &state));
    case Kind::kAwaitWeights:
      await(operation);
      return end_use(operation.unit);
    case Kind::kReshard:
      await(operation);
      begin_use(operation.unit);
      return state.unit->weights().release();
    case Kind::kRouteIntra:
      ++num_routes_;
      return enqueue(operation, route_intra(&mesh_, &owned_, &state, operation.hold));
    case Kind::kRouteInter:
      return enqueue(operation, route_inter(&mesh_, &owned_, &state));
    case Kind::kFinishRouteIntra:
      await(operation);
      return finish_route_intra(&state);
    case Kind::kFinishRouteInter:
      await(operation);
      return finish_route_inter(&state);
    case Kind::kUpdate:
    case Kind::kForward:
    case Kind::kBackward:
      core::bug("Executor: modules compute by themselves, got ", schedule::name_of(operation.kind));
  }
}

void Executor::sum_over_mesh(const at::Tensor& words, const std::string& what) {
  const auto sum_along = [&](Lane& lane, Group& group, const Event& after) {
    return lane.enqueue(pool_->device(), [&] { group.all_reduce_sum(words, what).wait(); },
                        {after});
  };
  const std::string described = what + " in step " + std::to_string(step_);
  const std::int64_t number = mesh_.watch->reach(Rendezvous::kOperation, described);
  const Event in_node = sum_along(mesh_.lanes->intra, mesh_.row, {});
  const Event done = sum_along(mesh_.lanes->inter, mesh_.column, in_node);
  mesh_.on_device->add({number, described}, done, pool_->device());
  done.wait();
}

void Executor::drain() {
  for (const UnitState& state : states_) {
    for (std::size_t kind = 0; kind < state.done.size(); ++kind)
      finish(state, static_cast<Kind>(kind));
  }
}

bool Executor::has_gradient(core::ParameterIndex parameter) const {
  const UnitState& state = states_[parameters_.at(parameter).unit_index()];
  return state.has_gradient[state.packing().place_of(parameter)];
}

void Executor::clear_gradient(core::ParameterIndex parameter) {
  UnitState& state = states_[parameters_.at(parameter).unit_index()];
  const PackedIndex place = state.packing().place_of(parameter);
  state.has_gradient[place] = false;
  state.partial_filled[place] = false;
  owned_.set_filled(parameter, false);
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
  all["allocations"] = static_cast<double>(pool_->num_allocations());
  all["messages_intra"] = static_cast<double>(mesh_.row.traffic().num_messages);
  all["messages_inter"] = static_cast<double>(mesh_.column.traffic().num_messages);
  all["bytes_sent_intra"] = static_cast<double>(mesh_.row.traffic().num_bytes);
  all["bytes_sent_inter"] = static_cast<double>(mesh_.column.traffic().num_bytes);
  return all;
}

}  // namespace dmuon::engine
