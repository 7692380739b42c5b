#include "dmuon/engine/engine.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/autograd.h"
#include "dmuon/engine/stopwatch.h"

namespace dmuon::engine {

using schedule::Pass;

Engine::Engine(Options options, Groups groups, std::vector<MatrixSpec> specs,
               const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& batches)
    : executor_(options, std::move(groups), std::move(specs), units, batches),
      resolver_(executor_.layout(), options.schedule, executor_.units_of_batches(),
                options.reshard_after_forward, this) {}

void Engine::bind(int index, std::vector<at::Tensor> parameters) {
  // A gradient may come without its unit's outputs having been watched; it too waits for the end of
  // backward.
  unit(index).bind(std::move(parameters), [this, index] {
    open_backward();
    resolver_.before_gradient(core::UnitIndex(index));
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
  resolver_.finish_routes();
  executor_.drain();
  groups().lanes->drain(options().device);
}

// A backward that raised has left its pass open. What it left counts only where it adds to earlier
// gradients: zero_grad() may have come since.
void Engine::settle() {
  take_turn();
  backward_.reset();
  resolver_.settle();
}

void Engine::settle_step() {
  executor_.profile().set_phase(Phase::kStep);
  settle();
  const bool backward = resolver_.owes_backward();
  if (backward || resolver_.holds_partial_sums()) {
    verdict_.reset();
    take_new_gradients();
  }
  resolver_.settle_step();
  if (backward) give_placeholder_gradients();
}

// Another engine's forward has no certain end: what it still owes goes before this engine's
// operations, on every rank. Its backward ends by itself, and a pass on demand owes nothing: asking
// the other ranks would hang where one of them has freed that engine already.
void Engine::take_turn() {
  Engine*& holder = *groups().turn;
  if (holder != nullptr && holder != this) {
    const schedule::Order& order = holder->resolver_.order();
    if (order.current() != Pass::kBackward && !order.on_demand()) holder->resolver_.end_pass();
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
  resolver_.begin_forward(c10::GradMode::is_enabled());
}

void Engine::before_forward(int index) {
  const std::optional<Pass> pass = resolver_.order().current();
  // In a backward this is a recomputation; its pass is the backward's.
  if (in_backward()) {
    open_backward();
  } else if (!pass || pass == Pass::kBackward) {
    begin_forward();
  }
  resolver_.before_use(core::UnitIndex(index));
}

void Engine::after_forward(int index) {
  if (!in_backward()) resolver_.after_forward(core::UnitIndex(index));
}

std::vector<at::Tensor> Engine::watch_inputs(int index, const std::vector<at::Tensor>& inputs) {
  return before_leaving_backward(
      inputs, [this, index] { resolver_.after_backward(core::UnitIndex(index)); });
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
  if (resolver_.order().current() == Pass::kBackward && !backward_.expired()) return;
  settle();
  verdict_.reset();
  take_new_gradients();
  executor_.profile().set_phase(Phase::kBackward);
  resolver_.begin_backward();
  auto alive = std::make_shared<bool>(true);
  backward_ = alive;
  at_end_of_backward([this, alive] { end_backward(); });
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
  resolver_.before_backward(core::UnitIndex(index));
  c10::AutoGradMode no_grad(false);
  unit(index).expect_gradients();
}

void Engine::end_backward() {
  backward_.reset();
  resolver_.end_backward();
  give_placeholder_gradients();
}

void Engine::give_placeholder_gradients() {
  for (std::size_t i = 0; i < placeholders_.size(); ++i) {
    if (placeholders_[i].requires_grad())
      placeholders_[i].mutable_grad() = placeholder_gradients_[i];
  }
}

void Engine::clear_gradient(int matrix) {
  verdict_.reset();
  resolver_.finish_routes();  // what is on its way would come back
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

const Verdict& Engine::agree(const HostNorms& host, std::uint32_t settings) {
  take_turn();
  settle_step();
  if (verdict_) return *verdict_;
  Stopwatch watch(seconds_["agree_s"]);
  const int num_slots = options().num_replicates * options().num_shards;
  AgreementInput input{resolver_.hash(), settings, {}, {}, host,
                       num_slots / options().host_replicates};
  for (std::size_t i = 0; i < num_matrices(); ++i) {
    const bool kept = placeholders_.empty() || placeholders_[i].grad().defined();
    input.has_gradient.push_back(kept && executor_.has_gradient(static_cast<int>(i)));
  }
  input.squared_norms.resize(num_matrices());
  for (const OwnedBatch& batch : executor_.batches()) {
    const std::vector<double> squared = batch.squared_norms();
    for (std::size_t i = 0; i < squared.size(); ++i)
      input.squared_norms[core::ParameterIndex(batch.matrices[i])] = squared[i];
  }
  verdict_ = engine::agree(groups().verdict, input);
  return *verdict_;
}

void Engine::step(const std::function<void(int)>& update) {
  settle();
  executor_.profile().set_phase(Phase::kStep);
  update_ = update;
  resolver_.step();
  update_ = nullptr;
  if (!options().schedule.asynchronous) executor_.drain();
}

void Engine::perform(const schedule::Operation& operation) {
  executor_.perform(operation, update_);
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
