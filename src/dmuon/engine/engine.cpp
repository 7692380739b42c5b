#include "dmuon/engine/engine.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/autograd.h"
#include "dmuon/engine/stopwatch.h"

namespace dmuon::engine {

using schedule::Moment;
using schedule::Pass;

Engine::Engine(Options options, Groups groups, std::vector<MatrixSpec> specs,
               const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& batches)
    : executor_(options, std::move(groups), std::move(specs), units, batches) {
  rebuild_schedule();
}

void Engine::bind(int index, std::vector<at::Tensor> parameters) {
  // A gradient may come without its unit's outputs having been watched; it too waits for the end of
  // backward.
  unit(index).bind(std::move(parameters), [this, index] {
    open_backward();
    executor_.finish_route(index);
  });
}

void Engine::set_placeholders(std::vector<at::Tensor> placeholders,
                              std::vector<at::Tensor> gradients) {
  core::invariant(placeholders.size() == num_matrices() && gradients.size() == num_matrices(),
                  "Engine::set_placeholders: expected ", num_matrices(), " of each");
  placeholders_ = std::move(placeholders);
  placeholder_gradients_ = std::move(gradients);
}

void Engine::drain() {
  executor_.drain();
  groups().lanes->drain(options().device);
}

void Engine::settle() {
  take_turn();
  // A backward that raised has left its pass open.
  if (order_.current() == Pass::kBackward) {
    end_backward(/*complete=*/false);
  } else {
    end_pass();
  }
  executor_.finish_routes();
}

void Engine::settle_step() {
  executor_.profile().set_phase(Phase::kStep);
  settle();
  const bool sync = sync_;
  if (order_.owes_backward()) {
    verdict_.reset();
    take_new_gradients();
    set_sync(forward_sync_);
    begin_backward();
    end_backward(/*complete=*/true);
  }
  // The last backward was under no_sync, or did not reach this unit: what is held goes on now,
  // unless it was cleared.
  executor_.profile().set_phase(Phase::kStep);
  set_sync(true);
  bool first = true;
  for (int index = 0; index < num_units(); ++index) {
    if (!executor_.held(index)) continue;
    verdict_.reset();
    if (std::exchange(first, false)) take_new_gradients();
    serve({Moment::kAfterBackward, index});
  }
  set_sync(sync);
  executor_.finish_routes();
}

bool Engine::holds_partial_sums() const {
  for (int index = 0; index < executor_.num_units(); ++index) {
    if (executor_.held(index)) return true;
  }
  return false;
}

void Engine::set_sync(bool sync) {
  sync_ = sync;
  executor_.hold_partial_sums(!sync);
}

// Another engine's forward has no certain end: what it still owes goes before this engine's
// operations, on every rank. Its backward ends by itself, and a pass on demand owes nothing: asking
// the other ranks would hang where one of them has freed that engine already.
void Engine::take_turn() {
  Engine*& holder = *groups().turn;
  if (holder != nullptr && holder != this && holder->order_.current() != Pass::kBackward &&
      !holder->order_.on_demand()) {
    holder->end_pass();
  }
  holder = this;
}

Engine::~Engine() {
  if (*groups().turn == this) *groups().turn = nullptr;
}

// ---- forward ----

void Engine::begin_forward() {
  if (in_backward()) return;
  take_turn();
  settle();
  executor_.profile().set_phase(Phase::kForward);
  if (c10::GradMode::is_enabled()) forward_sync_ = sync_;
  cross(order_.begin_forward(c10::GradMode::is_enabled()));
}

void Engine::before_forward(int index) {
  // In a backward this is a recomputation; its pass is the backward's.
  if (in_backward()) {
    open_backward();
  } else if (!order_.current() || order_.current() == Pass::kBackward) {
    begin_forward();
  }
  use(index);
}

// A unit that is ready already may still be what the schedule waits for, to send the next ones.
void Engine::use(int index) {
  if (!executor_.ready(index) || order_.is_next({Moment::kBeforeUse, index}))
    request(Moment::kBeforeUse, index);
}

void Engine::after_forward(int index) {
  if (in_backward() || !options().reshard_after_forward || !executor_.ready(index)) return;
  // A replay that does not owe it keeps the unit for the backward that follows.
  if (!order_.on_demand() && !order_.owes({Moment::kAfterForward, index})) return;
  request(Moment::kAfterForward, index);
}

std::vector<at::Tensor> Engine::watch_inputs(int index, const std::vector<at::Tensor>& inputs) {
  return before_leaving_backward(inputs, [this, index] {
    if (order_.current() == Pass::kBackward) request(Moment::kAfterBackward, index);
  });
}

void Engine::watch_outputs(int index, const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    on_gradient_of(output, [this, index] { before_backward(index); });
  }
}

void Engine::watch_root_outputs(const std::vector<at::Tensor>& outputs) {
  // The root's outputs come first in the outermost backward: nested ones (reentrant checkpoints)
  // end earlier.
  for (const at::Tensor& output : outputs) {
    on_gradient_of(output, [this] { open_backward(); });
  }
}

// ---- backward ----

void Engine::open_backward() {
  if (order_.current() == Pass::kBackward && !backward_.expired()) return;
  take_turn();
  settle();
  verdict_.reset();
  take_new_gradients();
  begin_backward();
  auto alive = std::make_shared<bool>(true);
  backward_ = alive;
  at_end_of_backward([this, alive] { end_backward(/*complete=*/true); });
}

void Engine::begin_backward() {
  executor_.profile().set_phase(Phase::kBackward);
  issued_.add(std::int64_t{sync_});
  cross(order_.begin_backward());
}

// Whether gradients add to earlier micro-steps' or replace them is said by the placeholder:
// model.zero_grad() takes its .grad away.
void Engine::take_new_gradients() {
  for (std::size_t i = 0; i < placeholders_.size(); ++i) {
    if (!placeholders_[i].grad().defined()) clear_gradient(static_cast<int>(i));
  }
}

void Engine::before_backward(int index) {
  open_backward();
  use(index);
  executor_.finish_route(
      index);  // of an earlier use in this pass: its gradients lie where new ones come
  c10::AutoGradMode no_grad(false);
  unit(index).expect_gradients();
}

void Engine::end_backward(bool complete) {
  backward_.reset();
  // Units whose inputs need no gradient, or whose gradients came without one, in the order of a
  // backward. A unit whose release is still owed is served by end_pass().
  for (int index = num_units() - 1; index >= 0; --index) {
    const bool open = executor_.ready(index) || unit(index).has_gradients();
    if (open && !order_.owes({Moment::kAfterBackward, index}))
      request(Moment::kAfterBackward, index);
  }
  end_pass();
  // What a raised backward left counts only where it adds to earlier gradients: zero_grad() may
  // have come since.
  if (!complete) return;
  for (std::size_t i = 0; i < placeholders_.size(); ++i) {
    if (placeholders_[i].requires_grad())
      placeholders_[i].mutable_grad() = placeholder_gradients_[i];
  }
}

void Engine::clear_gradient(int matrix) {
  verdict_.reset();
  executor_.clear_gradient(matrix);
}

void Engine::put_gradient(int index, int matrix, const at::Tensor& value) {
  const std::vector<int>& matrices = unit(index).packing().matrices;
  const auto found = std::find(matrices.begin(), matrices.end(), matrix);
  core::invariant(found != matrices.end(), "Engine::put_gradient: matrix ", matrix, " is not in ",
                  unit(index).name());
  unit(index).put_gradient(static_cast<std::size_t>(found - matrices.begin()), value);
}

// ---- step ----

void Engine::step(const std::function<void(int)>& update) {
  settle();
  executor_.profile().set_phase(Phase::kStep);
  executor_.new_version();
  for (const schedule::Operation& operation : schedule_.step) executor_.perform(operation, update);
  if (!options().schedule.asynchronous) executor_.drain();
}

at::Tensor Engine::collect_master(int matrix) {
  c10::AutoGradMode no_grad(false);
  drain();
  const MatrixSpec& spec = executor_.specs().at(static_cast<std::size_t>(matrix));
  at::Tensor whole = at::empty({spec.rows, spec.cols},
                               at::TensorOptions().dtype(at::kFloat).device(options().device));
  if (const Place place = executor_.place(matrix); place.batch >= 0) {
    whole.copy_(executor_.batches()[static_cast<std::size_t>(place.batch)]
                    .master[static_cast<std::int64_t>(place.index)]);
  }
  const int column = spec.owner % options().num_shards;
  if (column == options().shard) {
    groups().column.broadcast(whole, spec.owner / options().num_shards, "a whole weight").wait();
  }
  groups().row.broadcast(whole, column, "a whole weight").wait();
  return whole;
}

std::map<std::string, double> Engine::statistics() const {
  std::map<std::string, double> all = executor_.statistics();
  all.insert(seconds_.begin(), seconds_.end());
  all["comparisons"] = static_cast<double>(num_compared_);
  return all;
}

}  // namespace dmuon::engine
