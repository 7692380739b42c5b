#include "dmuon/engine/engine.h"

#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"
#include "dmuon/engine/agreement.h"
#include "dmuon/engine/autograd.h"
#include "dmuon/engine/stopwatch.h"

// Longer than other files because a step is told here in its order: each hook, what it tells the
// resolver, and what a pass that ended otherwise leaves to be settled.
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
  for (const layout::PackedLeafIndex i : leaves.indices()) {
    if (!placeholders_.empty())
      accumulate_into(unit(index).parameter(i), placeholders_.at(leaves[i].index));
  }
}

void Engine::set_placeholders(core::Vector<core::LeafIndex, at::Tensor> placeholders,
                              core::Vector<core::LeafIndex, at::Tensor> gradients) {
  const int expected = leaves().size();
  core::invariant(placeholders.size() == expected && gradients.size() == expected,
                  "Engine::set_placeholders: expected ", expected, " of each");
  placeholders_ = std::move(placeholders);
  placeholder_gradients_ = std::move(gradients);
}

void Engine::finish_update() {
  core::require(
      !wire::Lane::is_in_thread(),
      "a rule of update has read or changed the state of the optimizer or of the model, "
      "which waits for the update that calls the rule. Expected: what its function is given");
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

// A backward that raised has left its pass open. Its gradients count only if they add to earlier
// ones: zero_grad() may have come since.
void Engine::settle() {
  take_turn();
  const bool raised = resolver_.order().current() == Pass::kBackward;
  const bool averages = raised && backward_syncs_;
  if (raised) host_sums_.end_backward(backward_syncs_);
  backward_.reset();
  open_uses_.forget_backwards();
  if (raised) resolver_.end_backward();
  if (averages) others_.average(/*raised=*/true);
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

void Engine::settle_step() {
  executor_.profile().set_phase(Phase::kStep);
  settle();
  const bool backward = resolver_.owes_backward();
  if (backward || resolver_.holds_partial_sums()) {
    if (!backward) note_cleared(kept());
    verdict_.reset();
    take_new_gradients();
  }
  finish_update();
  const bool averages = resolver_.owes_synchronised_backward();
  if (backward) {
    resolver_.run_owed_backward();
    give_placeholder_gradients();
  }
  if (averages) others_.average(/*raised=*/false);
  resolver_.settle_step();
}

// A forward has no certain end: what it still owes goes before another engine's operations, on
// every rank. Its backward ends by itself, and what a pass on demand owes, ends of reads, may wait.
void Engine::take_turn() {
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
            if (engine->resolver_.order().owes_forward()) turn->keep(engine, std::move(last));
          }};
}

Engine::~Engine() { mesh().turn->give_up(this); }

// ---- forward ----

void Engine::open_forward(bool whole) {
  settle();
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
  open_uses_.forget_calls();
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
  if (call) call->has_end = true;
  return before_leaving_backward(inputs, [this, index, call, before_end = std::move(before_end)] {
    if (before_end) before_end();
    after_backward(index, call.get());
  });
}

void Engine::watch_outputs(core::UnitIndex index, const std::vector<at::Tensor>& outputs,
                           const std::shared_ptr<Call>& call) {
  for (const at::Tensor& output : outputs) {
    on_gradient_of(output, [this, index, call] { before_backward(index, call.get()); });
  }
}

void Engine::watch_root_outputs(const std::vector<at::Tensor>& outputs) {
  // The root's outputs come first in the outermost backward: nested ones (reentrant checkpoints)
  // end earlier.
  for (const at::Tensor& output : outputs) {
    on_gradient_of(output, [this] {
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
  host_sums_.begin_backward(cleared());
  cleared_.clear();
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

// A placeholder without .grad has been cleared: new gradients replace the old ones. Else they add
// to those of earlier micro-steps.
void Engine::take_new_gradients() {
  for (const core::LeafIndex leaf : placeholders_.indices()) {
    if (!placeholders_[leaf].grad().defined()) clear_gradient(leaf);
  }
}

// Notes the gradients that the last backward has given and this rank has cleared since, also those
// of modules that other ranks alone have used.
void Engine::note_cleared(const core::Vector<core::LeafIndex, bool>& held) {
  for (const core::LeafIndex leaf : given_) {
    const std::vector<core::ParameterIndex>& parts = leaves()[leaf].parameters;
    if (!held[leaf]) cleared_.insert(parts.begin(), parts.end());
  }
}

bool Engine::cleared() const {
  const auto trains = [](const at::Tensor& of) { return of.requires_grad(); };
  const core::Vector<core::LeafIndex, bool> held = kept();
  return std::any_of(placeholders_.begin(), placeholders_.end(), trains) &&
         std::none_of(held.begin(), held.end(), [](bool is) { return is; });
}

void Engine::before_backward(core::UnitIndex index, Call* call) {
  if (creates_graph()) return enter_second_order();
  open_backward();
  if (layout().units[index].host) host_sums_.use(index);
  if (!follows_second_order(index)) {
    // A call of several outputs says so for each.
    const bool reader = call != nullptr && call->reader;
    const bool begins = call != nullptr && open_uses_.begin_backward(index, call, num_backwards_);
    if (reader && !begins) return;
    resolver_.before_backward(index, reader);
    resolver_.set_in_use(index, open_uses_.any(index));
    executor_.begin_use(index);
  }
  c10::AutoGradMode no_grad(false);
  unit(index).expect_gradients();
}

// A use goes on while other readers' backwards are open.
void Engine::after_backward(core::UnitIndex index, Call* call) {
  if (creates_graph()) return enter_second_order();
  if (follows_second_order(index)) return;
  executor_.end_use(index);
  if (call != nullptr) open_uses_.end_backward(index, call, num_backwards_);
  const bool in_use = open_uses_.any(index);
  resolver_.set_in_use(index, in_use);
  if (call != nullptr && call->nested) return;
  if (call != nullptr && call->reader) {
    if (!in_use) resolver_.after_read({Moment::kAfterBackward, index});
  } else if (!open_uses_.is_read(index)) {
    resolver_.after_backward(index);
  }
}

void Engine::end_backward() {
  if (before_end_) before_end_();
  const bool averages = backward_syncs_;
  backward_.reset();
  open_uses_.forget_backwards();
  resolver_.end_backward();
  has_second_order_ &= keeps_graph();
  host_sums_.end_backward(averages);
  give_placeholder_gradients();
  if (averages) others_.average(/*raised=*/false);
  mesh().watch->enter("");
}

void Engine::give_placeholder_gradients() {
  for (const core::LeafIndex leaf : placeholders_.indices()) {
    at::Tensor& placeholder = placeholders_[leaf];
    if (!placeholder.requires_grad()) continue;
    placeholder.mutable_grad() = placeholder_gradients_[leaf];
    given_.insert(leaf);
  }
}

void Engine::clear_gradient(core::LeafIndex leaf) {
  verdict_.reset();
  resolver_.finish_routes();  // what is on its way would come back
  given_.erase(leaf);
  for (const core::ParameterIndex part : leaves().at(leaf).parameters)
    executor_.clear_gradient(part);
}

void Engine::zero_gradient(core::LeafIndex leaf) {
  host_sums_.clear_leaf();
  verdict_.reset();
  end_failed_backward();  // whose gradients would come later
  finish_update();
  resolver_.finish_routes();
  for (const core::ParameterIndex part : leaves().at(leaf).parameters)
    executor_.zero_gradient(part);
}

void Engine::put_gradient(core::LeafIndex leaf, const at::Tensor& value) {
  Unit& holder = unit(leaves().at(leaf).unit);
  holder.put_gradient(holder.packing().place_of(leaf), value);
}

// ---- step ----

void Engine::set_num_maxima(int num_maxima) {
  verdict_.reset();
  norms_.set_num_maxima(num_maxima);
  int& most = mesh().models->most_maxima;
  most = std::max(most, num_maxima);
}

const Verdict& Engine::agree(const at::Tensor& host, std::uint32_t settings,
                             const at::Tensor& maxima, bool has_open_gradients) {
  settle_step();
  core::require(
      !host_sums_.take_mixed(),
      "dmuon: micro-steps of one step have used different modules in which fully_shard manages "
      "parameters, some under no_sync, or gradients of no_sync were cleared but by "
      "optimizer.zero_grad(): FSDP2 would add gradients that do not belong together. Expected: the "
      "same modules in each micro-step, and optimizer.zero_grad().");
  if (agreed()) return *verdict_;
  Stopwatch watch(seconds_["agree_s"]);
  AgreementInput input;
  input.issued = core::Hasher()
                     .add(static_cast<std::int64_t>(resolver_.hash()))
                     .add(static_cast<std::int64_t>(mesh().watch->hash()))
                     .value();
  input.settings = settings;
  input.model = executor_.model();
  input.most_parameters = mesh().models->most_parameters;
  input.words_per_parameter = mesh().shape().tensor_parallel;
  input.has_open_gradients = has_open_gradients;
  const c10::AutoGradMode no_grad(false);
  input.missing_maxima = mesh().models->most_maxima - norms_.num_maxima();
  const at::Tensor words = norms_.measure(host, maxima);
  // They travel along where the host has them at hand.
  if (words.is_cpu()) input.words = words;
  kept_ = kept();
  note_cleared(kept_);
  for (const core::LeafIndex leaf : leaves().indices()) {
    for (const core::ParameterIndex part : leaves()[leaf].parameters) {
      input.has_gradient.push_back(kept_[leaf] && executor_.has_gradient(part));
      input.has_cleared.push_back(cleared_.contains(part));
    }
  }
  verdict_.reset();
  const std::int64_t num_norms = words.numel() - norms_.num_maxima();
  Agreed agreed = engine::agree(mesh().words, input);
  cleared_.clear();
  for (const core::ParameterIndex part : parameters().indices()) {
    core::require(
        !(agreed.has_gradient[part] && agreed.has_cleared[part]),
        "dmuon: some ranks have cleared the gradient of '", parameters()[part].name,
        "' behind their last backward, others have kept it. Expected: all ranks clear it, "
        "or none.");
  }
  verdict_ = Verdict{std::move(agreed.has_gradient), words.narrow(0, 0, num_norms),
                     mesh().shape().tensor_parallel,
                     words.narrow(0, num_norms, norms_.num_maxima()), agreed.has_open_gradients};
  // Elsewhere they travel on the device, once all ranks are known to step the same model: messages
  // of two models differ in length.
  if (!words.is_cpu()) executor_.max_over_mesh(words, "the norms");
  norms_.keep_only(verdict_->has_gradient);
  return *verdict_;
}

// [leaves] true unless the gradient was cleared by taking the placeholder's away.
core::Vector<core::LeafIndex, bool> Engine::kept() const {
  core::Vector<core::LeafIndex, bool> all;
  for (const core::LeafIndex leaf : leaves().indices())
    all.push_back(placeholders_.empty() || placeholders_[leaf].grad().defined());
  return all;
}

void Engine::scale_gradients(const at::Tensor& factor) {
  const c10::AutoGradMode no_grad(false);
  finish_update();
  owned().scale_gradients(factor);
  if (verdict_) verdict_->scale(factor);
}

void Engine::scale_gradient(core::LeafIndex leaf, const at::Tensor& factor) {
  const c10::AutoGradMode no_grad(false);
  finish_update();
  verdict_.reset();
  for (const core::ParameterIndex part : leaves().at(leaf).parameters) {
    if (owned().filled(part)) owned().of(part, wire::kGradient).mul_(factor);
  }
}

void Engine::step(std::shared_ptr<Update> update) {
  settle();
  finish_update();
  has_second_order_ = false;
  executor_.profile().set_phase(Phase::kStep);
  executor_.set_update(std::move(update));
  // Also after an error: what the update holds is of no more use.
  auto forget = c10::make_scope_exit([this] { executor_.set_update(nullptr); });
  resolver_.step();
  // On a device the lane may still read what it holds, which compute has allocated.
  if (options_.step.late_updates) forget.release();
}

void Engine::remove_owned(const std::string& name) {
  if (resolver_.has_update()) return removed_.push_back(name);
  owned().remove(name);
}

void Engine::publish() {
  settle();
  finish_update();
  has_second_order_ = false;
  executor_.profile().set_phase(Phase::kStep);
  resolver_.publish();
}

void Engine::perform(const schedule::Operation& operation) { executor_.perform(operation); }

void Engine::before_crossing(int num_crossed) {
  if (others_.places.contains(num_crossed)) others_.send_early(num_crossed);
}

std::map<std::string, double> Engine::statistics() const {
  std::map<std::string, double> all = executor_.statistics();
  all.insert(seconds_.begin(), seconds_.end());
  all["comparisons"] = static_cast<double>(num_compared_);
  return all;
}

}  // namespace dmuon::engine
