#include "dmuon/engine/executor.h"

#include <unistd.h>

#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/wire/plain_mode.h"
#include "dmuon/wire/publish.h"
#include "dmuon/wire/route.h"

namespace dmuon::engine {

using schedule::Kind;
using schedule::Operation;

namespace {

LocalPart part_of(const wire::SharedMesh& mesh, const plan::Plan& plan,
                  const layout::LeafSizes& sizes, const layout::Cuts& cuts) {
  const layout::Mesh shape = mesh.shape();
  core::invariant(plan.mesh == shape, "Engine: plan: expected one for a mesh of ",
                  shape.num_replicates, " x ", shape.num_shards, " x ", shape.tensor_parallel);
  return local_part(plan, sizes, cuts, mesh.slot(), mesh.tensor_rank());
}

}  // namespace

Executor::Executor(wire::SharedMesh mesh, const plan::Plan& plan,
                   const std::vector<UnitSpec>& units, bool node_copy, c10::Device device,
                   const layout::LeafSizes& sizes, const layout::Cuts& cuts)
    : mesh_(std::move(mesh)),
      part_(part_of(mesh_, plan, sizes, cuts)),
      place_of_(part_.parameters.size()),
      pool_(std::make_shared<wire::BufferPool>(device)),
      owned_(part_.parameters, part_.batches, pool_),
      batches_(owned_.batches().size()),
      profile_(device),
      model_(mesh_.models->add(part_.parameters.size())) {
  for (wire::Group& group : mesh_.along) group.keep_apart(model_);
  for (const UnitSpec& spec : units) {
    layout::Packing packing =
        layout::pack(part_.parameters, part_.leaves, core::UnitIndex(states_.size()), mesh_.shape(),
                     /*pads=*/!device.is_cpu());
    UnitState& state = states_.emplace_back();
    state.host = spec.host;
    state.has_gradient.resize(packing.parameters.size());
    for (const layout::PackedIndex place : packing.parameters.indices())
      place_of_[packing.parameters[place].index] = place;
    state.buffers = std::make_unique<wire::UnitBuffers>(spec.name, std::move(packing), pool_,
                                                        spec.compute_dtype, spec.reduce_dtype);
    state.unit = std::make_unique<Unit>(part_.leaves, state.buffers.get());
    if (!node_copy || !mesh_.has_inter() || state.buffers->packing.empty()) continue;
    state.buffers->node_copy = std::make_unique<wire::PackedBuffer>(
        pool_, state.buffers->packing.column_elements(mesh_.shard()), spec.compute_dtype);
    state.buffers->node_copy->allocate();
  }
  for (const layout::OwnedParameter& parameter : part_.parameters) {
    core::invariant(states_.contains(parameter.unit_index()), "Engine: plan: expected units below ",
                    states_.size(), ", got ", parameter.unit);
  }
}

namespace {

// Returns false if an operation has failed.
bool wait_quietly(const schedule::PerKind<Newest>& operations) {
  bool all_done = true;
  for (const Newest& newest : operations) {
    try {
      newest.done.wait();
    } catch (const std::exception&) {  // a lost peer: whoever waited has raised
      all_done = false;
    }
  }
  return all_done;
}

}  // namespace

// Operations in flight use this object's buffers.
Executor::~Executor() {
  if (getpid() != mesh_.process) return;  // a forked child has no lanes
  for (const schedule::PerKind<Newest>& batch : batches_) wait_quietly(batch);
  for (UnitState& state : states_) {
    state.weights_used.wait();
    state.unit->await_gradients();
    const bool all_done = wait_quietly(state.newest);
    // A failed lane drops its messages unwaited, and gloo's threads may still be in a collective on
    // these buffers. Nothing says when they leave it, so the buffers are never freed.
    if (!all_done && pool_->device().is_cpu()) static_cast<void>(state.buffers.release());
  }
}

// Equal on all ranks, which compare it.
std::string Executor::described(schedule::Kind kind, core::UnitIndex unit) const {
  return schedule::name_of(kind) + (" of '" + states_[unit].unit->name()) + "' " + when();
}

std::string Executor::when() const {
  std::string text = "in step " + std::to_string(step_);
  if (mesh_.models->num_made > 1) text += " of model " + std::to_string(model_);
  return text;
}

Newest& Executor::newest(schedule::Kind kind, const schedule::Subject& subject) {
  if (const auto* unit = std::get_if<core::UnitIndex>(&subject))
    return states_.at(*unit).newest[kind];
  return batches_.at(std::get<core::BatchIndex>(subject))[kind];
}

void Executor::enqueue(const Operation& operation, wire::Work work) {
  std::vector<wire::Event> after;
  for (const schedule::Dependency& dependency : operation.after)
    after.push_back(newest(dependency.kind, dependency.subject).done);
  const schedule::Lane lane = schedule::lane_of(operation.kind);
  wire::Lane& queue = (*mesh_.lanes)[lane];
  const auto timed = [this, &queue, kind = operation.kind, subject = operation.subject,
                      issued = profile_.clock().now(), work = std::move(work)]() -> wire::Rest {
    const wire::Instant started = profile_.clock().now();
    const auto measure = [=, this, &queue] {
      const wire::Instant done = profile_.clock().now();
      const wire::Instant since{queue.claim(started.host, done.host), started.event};
      profile_.add({kind, subject, issued, since, done});
    };
    wire::Rest rest = work.begin();
    if (!rest) {
      measure();
      return {};
    }
    return [measure, rest = std::move(rest)] {
      rest();
      measure();
    };
  };
  const bool meets_others = schedule::carries_messages(lane);
  std::string what;
  Newest& made = newest(operation.kind, operation.subject);
  if (meets_others) {
    what = described(operation.kind, operation.unit());
    made.number = mesh_.watch->reach(watch::Rendezvous::kOperation, what);
  }
  if (schedule::is_on_batch(operation.kind)) made.number = update_->number;
  made.done = queue.enqueue(pool_->device(), timed, std::move(after));
  if (meets_others && !pool_->device().is_cpu())
    mesh_.on_device->add({made.number, std::move(what)}, made.done, pool_->device());
}

void Executor::await(const Operation& operation) {
  const wire::Instant started = profile_.clock().now();
  for (const schedule::Dependency& dependency : operation.after)
    finish(dependency.kind, dependency.subject);
  profile_.add({operation.kind, operation.subject, started, started, profile_.clock().now()});
}

void Executor::finish(Kind kind, const schedule::Subject& subject) {
  const Newest& awaited = newest(kind, subject);
  if (schedule::is_on_batch(kind)) return finish_update(kind, subject, awaited);
  mesh_.watch->wait_for(awaited.done, watch::Rendezvous::kOperation, awaited.number,
                        [&] { return described(kind, std::get<core::UnitIndex>(subject)); });
}

void Executor::drain_lanes() {
  for (wire::Lane& lane : *mesh_.lanes) {
    mesh_.watch->wait_for(lane.enqueue(pool_->device(), [] {}, {}), watch::Rendezvous::kOperation,
                          mesh_.watch->num_operations(),
                          [] { return std::string("all operations in flight"); });
  }
}

void Executor::perform(const Operation& operation) {
  const wire::PlainMode plain;
  if (!schedule::is_on_batch(operation.kind)) return perform_on_unit(operation);
  if (operation.kind == Kind::kFinishUpdate) return await(operation);
  enqueue_update(operation);
}

void Executor::take_back(core::UnitIndex unit) {
  const wire::PlainMode plain;
  wire::take_back(mesh_, owned_, states_.at(unit).buffers.get());
}

void Executor::perform_on_unit(const Operation& operation) {
  UnitState& state = states_.at(operation.unit());
  switch (operation.kind) {
    case Kind::kPublishInter:
      return enqueue(operation, wire::publish_inter(&mesh_, &owned_, state.buffers.get()));
    case Kind::kPublishIntra:
      ++num_unshards_;
      return enqueue(operation, wire::publish_intra(&mesh_, &owned_, state.buffers.get()));
    case Kind::kAwaitWeights:
      await(operation);
      return end_use(operation.unit());
    case Kind::kReshard:
      await(operation);
      begin_use(operation.unit());
      return state.unit->weights().release();
    case Kind::kRouteIntra:
      ++num_routes_;
      owned_.multiply_factor_in();  // lanes add to them
      take_gradients(&state);
      return enqueue(operation,
                     wire::route_intra(&mesh_, &owned_, state.buffers.get(), operation.hold));
    case Kind::kRouteInter:
      owned_.multiply_factor_in();
      return enqueue(operation, wire::route_inter(&mesh_, &owned_, state.buffers.get()));
    case Kind::kFinishRouteIntra:
      await(operation);
      return wire::finish_route_intra(state.buffers.get());
    case Kind::kFinishRouteInter:
      await(operation);
      return wire::finish_route_inter(state.buffers.get());
    case Kind::kPrepare:
    case Kind::kGather:
    case Kind::kOrthogonalise:
    case Kind::kScatter:
    case Kind::kApply:
    case Kind::kFinishUpdate:
      core::bug("Executor: expected an operation on a unit, got ",
                schedule::name_of(operation.kind));
  }
}

void Executor::take_gradients(UnitState* state) {
  Unit& unit = *state->unit;
  unit.fill_missing_gradients();
  const layout::Packing& packing = unit.packing();
  for (const layout::PackedIndex place : packing.parameters.indices()) {
    if (unit.arrived(packing.parameters[place].leaf)) state->has_gradient[place] = true;
  }
  unit.hand_over_gradients();
}

void Executor::max_over_mesh(const at::Tensor& words, const std::string& what) {
  const auto max_along = [&](wire::Lane& lane, wire::Group& group, const wire::Event& after) {
    return lane.enqueue(pool_->device(), [&] { group.all_reduce_max(words, what).wait(); },
                        {after});
  };
  const std::string described = what + " " + when();
  const std::int64_t number = mesh_.watch->reach(watch::Rendezvous::kOperation, described);
  const wire::Event in_node = max_along((*mesh_.lanes)[schedule::Lane::kIntra], mesh_.row(), {});
  wire::Event done = max_along((*mesh_.lanes)[schedule::Lane::kInter], mesh_.column(), in_node);
  if (mesh_.tensor_parallel) {
    done = max_along((*mesh_.lanes)[schedule::Lane::kSlices], mesh_.tensor_parallel->slices, done);
  }
  mesh_.on_device->add({number, described}, done, pool_->device());
  done.wait();
}

void Executor::drain() {
  for (const Kind kind : schedule::kKinds) {
    if (schedule::is_on_batch(kind)) {
      for (const core::BatchIndex batch : batches_.indices()) finish(kind, batch);
    } else {
      for (const core::UnitIndex unit : states_.indices()) finish(kind, unit);
    }
  }
}

bool Executor::has_gradient(core::ParameterIndex parameter) const {
  const UnitState& state = states_[part_.parameters.at(parameter).unit_index()];
  return state.has_gradient[place_of_[parameter]];
}

void Executor::clear_gradient(core::ParameterIndex parameter) {
  UnitState& state = states_[part_.parameters.at(parameter).unit_index()];
  const layout::PackedIndex place = place_of_[parameter];
  state.has_gradient[place] = false;
  state.buffers->partial_filled[place] = false;
  owned_.set_filled(parameter, false);
}

void Executor::zero_gradient(core::ParameterIndex parameter) {
  const c10::AutoGradMode no_grad(false);
  UnitState& state = states_[part_.parameters.at(parameter).unit_index()];
  // A partial sum that is not filled is overwritten, so it counts as zero.
  state.buffers->partial_filled[place_of_[parameter]] = false;
  if (owned_.filled(parameter)) owned_.of(parameter, wire::kGradient).zero_();
}

}  // namespace dmuon::engine
