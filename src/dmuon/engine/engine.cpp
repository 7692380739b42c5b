#include "dmuon/engine/engine.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/autograd.h"

namespace dmuon::engine {

using schedule::Moment;
using schedule::Pass;

Engine::Engine(EngineOptions options, wire::SharedMesh mesh, const plan::Plan& plan,
               const std::vector<UnitSpec>& units, const layout::LeafSizes& sizes,
               const layout::Cuts& cuts)
    : options_(options),
      executor_(std::move(mesh), plan, units, options.step.node_copy, options.device, sizes, cuts),
      resolver_(executor_.layout(), options.step, executor_.units_of_batches(), this),
      open_uses_(executor_.layout().units.size()),
      transfers_(
          &executor_, num_host_shards(), [this] { drain(); }, [this] { finish_update(); }),
      host_sums_(options.host_replicates > 1),
      placeholders_(leaves().size()),
      norms_(owned(), executor_.sliced(), this->mesh().shape(), this->mesh().slot(),
             this->mesh().tensor_rank(), num_host_shards()) {
  owned().set_gradient_scale(options_.gradient_scale);
}

void Engine::bind(core::UnitIndex index, std::vector<at::Tensor> parameters,
                  Unit::ToLocal to_local) {
  // A gradient may come without its unit's outputs having been watched; it too waits for the end of
  // backward.
  const auto on_gradient = [this, index] {
    core::require(!creates_graph(),
                  "dmuon: a backward with create_graph=True has given gradients to matrices. "
                  "Expected: torch.autograd.grad(..., create_graph=True), then a backward of what "
                  "is made of its results.");
    open_backward();
    resolver_.before_gradient(index);
  };
  unit(index).bind(std::move(parameters), on_gradient, std::move(to_local));
  const auto& leaves = unit(index).packing().leaves;
  for (const layout::PackedLeafIndex i : leaves.indices())
    placeholders_.accumulate(leaves[i].index, unit(index).parameter(i));
}

void Engine::refuse_in_update() {
  core::require(
      !wire::Lane::is_in_operation(),
      "a rule of update has used a model of dmuon, or the state of its optimizer, which waits for "
      "the update that calls the rule. Expected: what its function is given");
}

void Engine::finish_update() {
  refuse_in_update();
  resolver_.finish_update();
  executor_.await_update();
  for (const std::string& name : std::exchange(removed_, {})) owned().remove(name);
}

void Engine::drain() {
  finish_update();
  resolver_.finish_routes();
  executor_.drain();
  executor_.drain_lanes();
}

void Engine::move_out() {
  if (options_.step.replicated) resolver_.free_weights();
  drain();
  offload_.move_out();
}

// A backward that raised has left its pass open. Its gradients count only if they add to earlier
// ones: zero_grad() may have come since.
void Engine::settle() {
  take_turn();
  if (resolver_.order().current() == Pass::kBackward) close_backward(/*raised=*/true);
  resolver_.settle();
  mesh().watch->enter("");
}

bool Engine::end_failed_backward() {
  if (resolver_.order().current() != Pass::kBackward || in_backward()) return false;
  settle();
  return true;
}

void Engine::set_sync(bool sync) {
  end_failed_backward();  // by the schedule with which it began
  resolver_.set_sync(sync);
}

// A forward has no certain end: what it still owes goes before another engine's operations, on
// every rank. Its backward ends by itself, and what a pass on demand owes, ends of reads, may wait.
void Engine::take_turn() {
  refuse_in_update();
  mesh().turn->take(this, [this] {
    const schedule::Order& order = resolver_.order();
    if (order.current() != Pass::kBackward && !order.on_demand()) resolver_.end_pass();
  });
}

std::shared_ptr<Engine> Engine::make(EngineOptions options, wire::SharedMesh mesh,
                                     const plan::Plan& plan, const std::vector<UnitSpec>& units,
                                     const layout::LeafSizes& sizes, const layout::Cuts& cuts) {
  auto made = std::make_unique<Engine>(options, std::move(mesh), plan, units, sizes, cuts);
  return {made.release(), [](Engine* engine) {
            std::shared_ptr<Engine> last(engine);
            const std::shared_ptr<wire::Turn> turn = engine->mesh().turn;
            const bool has_peers = engine->mesh().everyone.size() > 1;
            if (has_peers && engine->resolver_.order().owes_forward())
              turn->keep(engine, std::move(last));
          }};
}

Engine::~Engine() { mesh().turn->give_up(this); }

// ---- forward ----

void Engine::open_forward(bool whole) {
  settle();
  open_uses_.forget_calls();  // of a forward that an interrupt has ended
  executor_.profile().set_phase(Phase::kForward);
  const bool trains = c10::GradMode::is_enabled();
  if (!trains) ++num_evaluations_;
  enter(trains ? "a training forward" : "an evaluation forward");
  resolver_.begin_forward(trains, whole);
}

// A rank that has evaluated alone may be found out in a later pass, so it says how often it has.
void Engine::enter(const char* pass) {
  mesh().watch->enter(num_evaluations_ == 0
                          ? pass
                          : core::message(pass, ", evaluation forwards so far ", num_evaluations_));
}

// In a backward the model is recomputed, which is a part of that pass.
void Engine::begin_forward() {
  if (in_backward()) return;
  open_forward(/*whole=*/true);
}

void Engine::end_forward() {
  if (in_backward()) return;
  resolver_.end_forward();
  mesh().watch->enter("");
}

void Engine::before_forward(core::UnitIndex index, bool reader) {
  if (in_second_order(index)) return;
  const std::optional<Pass> pass = resolver_.order().current();
  // In a backward this is a recomputation; its pass is the backward's.
  if (in_backward()) {
    open_backward();
  } else if (!pass || pass == Pass::kBackward ||
             (c10::GradMode::is_enabled() && resolver_.may_begin_training())) {
    open_forward(/*whole=*/false);
  }
  if (follows_second_order(index)) return;
  open_uses_.begin_call(index);
  resolver_.before_use(index, reader);
  resolver_.set_in_use(index, true);
  executor_.begin_use(index);
}

void Engine::after_forward(core::UnitIndex index, bool reader) {
  if (in_second_order(index) || follows_second_order(index)) return;
  executor_.end_use(index);
  open_uses_.end_call(index);
  const bool in_use = open_uses_.any(index);
  resolver_.set_in_use(index, in_use);
  const bool recomputes = in_backward();
  if (in_use) return;
  if (reader) {
    resolver_.after_read({recomputes ? Moment::kAfterBackward : Moment::kAfterForward, index});
  } else if (!recomputes) {
    resolver_.after_forward(index);
  }
}

std::vector<at::Tensor> Engine::watch_inputs(core::UnitIndex index,
                                             const std::vector<at::Tensor>& inputs,
                                             const std::shared_ptr<Call>& call,
                                             std::function<void()> before_end) {
  call->has_end = true;
  return before_leaving_backward(
      inputs, [lives = self_.lock(), this, index, call, before_end = std::move(before_end)] {
        if (!call->nested) before_end();
        after_backward(index, *call);
      });
}

void Engine::watch_outputs(core::UnitIndex index, const std::vector<at::Tensor>& outputs,
                           const std::shared_ptr<Call>& call) {
  for (const at::Tensor& output : outputs) {
    on_gradient_of(output,
                   [lives = self_.lock(), this, index, call] { before_backward(index, *call); });
  }
}

void Engine::watch_root_outputs(const std::vector<at::Tensor>& outputs) {
  // The root's outputs come first in the outermost backward: nested ones (reentrant checkpoints)
  // end earlier.
  for (const at::Tensor& output : outputs) {
    on_gradient_of(output, [lives = self_.lock(), this] {
      if (creates_graph()) return enter_second_order();
      open_backward();
    });
  }
}

// ---- backward ----

bool Engine::backward_is_open() const {
  return resolver_.order().current() == Pass::kBackward && !backward_.expired();
}

void Engine::open_backward() {
  if (backward_is_open()) return;
  core::require(no_backward_.empty(), no_backward_);
  settle();
  verdict_.reset();
  const bool begins_anew = placeholders_.all_cleared();
  if (begins_anew) last_anew_ = num_backwards_ + 1;
  host_sums_.begin_backward(begins_anew);
  placeholders_.forget_cleared();
  take_new_gradients();
  executor_.profile().set_phase(Phase::kBackward);
  enter("a backward");
  finish_update();  // which reads the gradients that routes change, whatever stream awaited it
  // Another backward through the graph, such as one that creates a graph, reads kept weights again.
  resolver_.begin_backward(keeps_graph() && !options_.step.reshard_after_forward);
  ++num_backwards_;
  auto alive = std::make_shared<bool>(true);
  backward_ = alive;
  backward_syncs_ = resolver_.syncs();
  at_end_of_backward([this, alive] { end_backward(); });
}

// New gradients replace cleared ones, and add to those of earlier micro-steps.
void Engine::take_new_gradients() {
  const Placeholders::PerLeaf kept = placeholders_.kept();
  for (const core::LeafIndex leaf : kept.indices())
    if (!kept[leaf]) clear_gradient(leaf);
}

void Engine::before_backward(core::UnitIndex index, Call& call) {
  if (creates_graph()) return enter_second_order();
  open_backward();
  if (layout().units[index].host) host_sums_.use(index);
  if (!follows_second_order(index)) {
    // A call of several outputs says so for each.
    const bool begins = open_uses_.begin_backward(index, call, num_backwards_);
    if (call.reader && !begins) return;
    resolver_.before_backward(index, call.reader);
    resolver_.set_in_use(index, open_uses_.any(index));
    executor_.begin_use(index);
  }
  c10::AutoGradMode no_grad(false);
  unit(index).expect_gradients();
}

// A use goes on while other readers' backwards are open.
void Engine::after_backward(core::UnitIndex index, Call& call) {
  if (creates_graph()) return enter_second_order();
  if (follows_second_order(index)) return;
  executor_.end_use(index);
  open_uses_.end_backward(index, call, num_backwards_);
  const bool in_use = open_uses_.any(index);
  resolver_.set_in_use(index, in_use);
  if (call.nested) return;
  if (call.reader) {
    if (!in_use) resolver_.after_read({Moment::kAfterBackward, index});
  } else if (!open_uses_.is_read(index)) {
    resolver_.after_backward(index);
  }
}

void Engine::end_backward() {
  if (before_end_) before_end_();
  has_second_order_ &= keeps_graph();
  close_backward(/*raised=*/false);
  mesh().watch->enter("");
}

void Engine::close_backward(bool raised) {
  backward_.reset();
  open_uses_.forget_backwards();
  resolver_.end_backward();
  host_sums_.end_backward(backward_syncs_);
  if (!raised) placeholders_.give_gradients();
  if (backward_syncs_) others_.average(raised);
}

}  // namespace dmuon::engine
