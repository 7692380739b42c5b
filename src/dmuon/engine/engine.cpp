#include "dmuon/engine/engine.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/autograd.h"
#include "dmuon/engine/stopwatch.h"

namespace dmuon::engine {
namespace {

using schedule::Action;
using schedule::Issue;
using schedule::Pass;

// Stands for an action where a pass ends or gradients are agreed on: a rank that wants more
// operations than the others then meets this one, and all of them can say so.
constexpr int kEndOfPass = -1;

std::string wish(std::int64_t action, std::int64_t unit,
                 const std::vector<std::unique_ptr<Unit>>& units) {
  if (action == kEndOfPass) return "the end of the pass";
  const char* verb = "release";
  if (action == static_cast<int>(Action::kUnshard)) verb = "unshard";
  if (action == static_cast<int>(Action::kReshard)) verb = "reshard";
  const bool known = unit >= 0 && unit < static_cast<std::int64_t>(units.size());
  return core::message(verb, " '", known ? units[static_cast<std::size_t>(unit)]->name() : "?",
                       "'");
}

}  // namespace

Engine::Engine(Options options, Groups groups, std::vector<MatrixSpec> specs,
               const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& batches)
    : options_(options),
      groups_(std::move(groups)),
      specs_(std::move(specs)),
      pool_(std::make_shared<BufferPool>(options.device)),
      places_(specs_.size()),
      has_gradient_(specs_.size(), false) {
  for (const UnitSpec& spec : units) {
    Packing packing = pack(specs_, spec.matrices, options_.num_replicates, options_.num_shards);
    const Segment own = packing.columns[static_cast<std::size_t>(options_.shard)];
    units_.push_back(std::make_unique<Unit>(spec.name, specs_, std::move(packing), pool_,
                                            spec.compute_dtype, spec.reduce_dtype));
    std::unique_ptr<PackedBuffer> copy;
    if (options_.node_copy && options_.num_replicates > 1) {
      copy = std::make_unique<PackedBuffer>(pool_, own.size(), spec.compute_dtype);
      copy->allocate();
    }
    node_copies_.push_back(std::move(copy));
    node_versions_.push_back(-1);
  }
  for (const std::vector<int>& batch : batches) {
    const MatrixSpec& first = specs_.at(static_cast<std::size_t>(batch.at(0)));
    for (std::size_t i = 0; i < batch.size(); ++i) {
      core::invariant(is_owner(batch[i]), "Engine: matrix ", batch[i], " is in a batch of slot ",
                      slot(), " and owned by slot ",
                      specs_[static_cast<std::size_t>(batch[i])].owner);
      places_[static_cast<std::size_t>(batch[i])] = {static_cast<int>(batches_.size()), i};
    }
    batches_.emplace_back(batch, first.rows, first.cols, options_.device);
    pool_->count(batches_.back().num_bytes());
  }
}

void Engine::bind(int index, std::vector<at::Tensor> parameters) {
  // A gradient may come without its unit's outputs having been watched; it too waits for the end of
  // backward.
  unit(index).bind(std::move(parameters), [this] { open_backward(); });
}

void Engine::set_placeholders(std::vector<at::Tensor> placeholders,
                              std::vector<at::Tensor> gradients) {
  core::invariant(placeholders.size() == specs_.size() && gradients.size() == specs_.size(),
                  "Engine::set_placeholders: expected ", specs_.size(), " of each");
  placeholders_ = std::move(placeholders);
  placeholder_gradients_ = std::move(gradients);
}

// ---- operations ----

void Engine::compare(int action, int unit) {
  Stopwatch watch(seconds_["compare_s"]);
  const auto pass = order_.current() ? static_cast<std::int64_t>(*order_.current()) : -1;
  const auto all = groups_.order.all_gather({pass, action, unit, num_compared_++},
                                            "the comparison of a traced step");
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw core::InvalidArgument(
        core::message("dmuon: ranks disagree in a traced step: rank 0 of the mesh is at ",
                      wish(all[0][1], all[0][2], units_), ", rank ", rank, " is at ",
                      wish(all[rank][1], all[rank][2], units_),
                      ". Expected: in the first step, and in a step that uses modules in a new "
                      "order, all ranks use the same "
                      "modules in the same order. Later a rank may skip modules."));
  }
}

void Engine::perform(const Issue& issue) {
  Unit& unit = *units_.at(static_cast<std::size_t>(issue.operation.unit));
  switch (issue.operation.action) {
    case Action::kUnshard:
      unshard(unit);
      return;
    case Action::kReshard:
      unit.weights().release();
      return;
    case Action::kRelease:
      unit.weights().release();
      if (issue.last) route(unit);
      return;
  }
}

void Engine::issue(const std::vector<Issue>& issues) {
  for (const Issue& next : issues) {
    if (next.compare) compare(static_cast<int>(next.operation.action), next.operation.unit);
    issued_.add(static_cast<std::int64_t>(next.operation.action))
        .add(std::int64_t{next.operation.unit});
    perform(next);
  }
}

void Engine::request(Action action, int unit) { issue(order_.request({action, unit})); }

void Engine::end_pass() {
  if (!order_.current()) return;
  if (order_.on_demand()) compare(kEndOfPass, 0);
  issue(order_.end_pass());
}

void Engine::settle() {
  // A backward that raised has left its pass open.
  if (order_.current() == Pass::kBackward) {
    end_backward(/*complete=*/false);
  } else {
    end_pass();
  }
}

void Engine::settle_step() {
  settle();
  if (!order_.owes_backward()) return;
  verdict_.reset();
  take_new_gradients();
  issue(order_.begin_backward());
  end_backward(/*complete=*/true);
}

// Another engine's forward has no certain end: what it still owes goes before this engine's
// operations, on every rank. Its backward ends by itself, and a pass on demand owes nothing: asking
// the other ranks would hang where one of them has freed that engine already.
void Engine::take_turn() {
  Engine*& holder = *groups_.turn;
  if (holder != nullptr && holder != this && holder->order_.current() != Pass::kBackward &&
      !holder->order_.on_demand()) {
    holder->end_pass();
  }
  holder = this;
}

Engine::~Engine() {
  if (*groups_.turn == this) *groups_.turn = nullptr;
}

// ---- forward ----

void Engine::begin_forward() {
  if (in_backward()) return;
  take_turn();
  settle();
  issue(order_.begin_forward(c10::GradMode::is_enabled()));
}

void Engine::before_forward(int index) {
  // In a backward this is a recomputation; its pass is the backward's.
  if (in_backward()) {
    open_backward();
  } else if (!order_.current() || order_.current() == Pass::kBackward) {
    begin_forward();
  }
  if (!unit(index).live()) request(Action::kUnshard, index);
}

void Engine::after_forward(int index) {
  if (in_backward() || !options_.reshard_after_forward || !unit(index).live()) return;
  // A replay that does not owe it keeps the unit for the backward that follows.
  if (!order_.on_demand() && !order_.owes({Action::kReshard, index})) return;
  request(Action::kReshard, index);
}

std::vector<at::Tensor> Engine::watch_inputs(int index, const std::vector<at::Tensor>& inputs) {
  return before_leaving_backward(inputs, [this, index] {
    if (order_.current() == Pass::kBackward) request(Action::kRelease, index);
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
  issue(order_.begin_backward());
  auto alive = std::make_shared<bool>(true);
  backward_ = alive;
  at_end_of_backward([this, alive] { end_backward(/*complete=*/true); });
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
  Unit& used = unit(index);
  if (!used.live()) request(Action::kUnshard, index);
  c10::AutoGradMode no_grad(false);
  used.expect_gradients();
}

void Engine::end_backward(bool complete) {
  backward_.reset();
  // Units whose inputs need no gradient, or whose gradients came without one, in the order of a
  // backward. A unit whose release is still owed is served by end_pass().
  for (int index = num_units() - 1; index >= 0; --index) {
    const bool open = unit(index).live() || unit(index).has_gradients();
    if (open && !order_.owes({Action::kRelease, index})) request(Action::kRelease, index);
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
  has_gradient_.at(static_cast<std::size_t>(matrix)) = false;
  const Place& place = places_[static_cast<std::size_t>(matrix)];
  if (place.batch >= 0) batches_[static_cast<std::size_t>(place.batch)].filled[place.index] = false;
}

std::map<std::string, double> Engine::statistics() const {
  std::map<std::string, double> all = seconds_;
  double copies = 0;
  for (const auto& unit : units_) copies += static_cast<double>(unit->num_gradient_copies());
  all["gradient_copies"] = copies;
  all["unshards"] = static_cast<double>(num_unshards_);
  all["routes"] = static_cast<double>(num_routes_);
  all["comparisons"] = static_cast<double>(num_compared_);
  all["current_bytes"] = static_cast<double>(pool_->current_bytes());
  all["peak_bytes"] = static_cast<double>(pool_->peak_bytes());
  all["messages_intra"] = static_cast<double>(groups_.row.traffic().num_messages);
  all["messages_inter"] = static_cast<double>(groups_.column.traffic().num_messages);
  all["bytes_sent_intra"] = static_cast<double>(groups_.row.traffic().num_bytes);
  all["bytes_sent_inter"] = static_cast<double>(groups_.column.traffic().num_bytes);
  return all;
}

}  // namespace dmuon::engine
