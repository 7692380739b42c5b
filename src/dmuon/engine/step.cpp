// The step of engine::Engine: what ranks agree on, changes of gradients, new weights.

#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"
#include "dmuon/engine/agreement.h"
#include "dmuon/engine/engine.h"
#include "dmuon/engine/stopwatch.h"
#include "dmuon/wire/plain_mode.h"

namespace dmuon::engine {

void Engine::settle_step() {
  executor_.profile().set_phase(Phase::kStep);
  settle();
  const bool backward = resolver_.owes_backward();
  if (backward || resolver_.holds_partial_sums()) {
    if (backward) {
      placeholders_.forget_cleared();
    } else {
      placeholders_.note_cleared();
    }
    verdict_.reset();
    take_new_gradients();
  }
  finish_update();
  resolver_.settle_step([this](bool synchronised) {
    placeholders_.give_gradients();
    if (synchronised) others_.average(/*raised=*/false);
  });
}

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
  Stopwatch watch(seconds_["agree_s"]);
  AgreementInput input;
  input.issued = core::Hasher()
                     .add(static_cast<std::int64_t>(resolver_.hash()))
                     .add(static_cast<std::int64_t>(mesh().watch->hash()))
                     .value();
  input.settings = settings;
  input.model = executor_.model();
  const wire::Models& models = *mesh().models;
  input.most_parameters = models.most_parameters;
  const NormWords& at = norms_.at();
  input.most_words =
      NormWords{models.most_parameters, at.tensor_parallel, at.num_slots, models.most_maxima}
          .size();
  input.has_open_gradients = has_open_gradients;
  const c10::AutoGradMode no_grad(false);
  const at::Tensor words = norms_.measure(host, maxima);
  // They travel along where the host has them at hand.
  if (words.is_cpu()) input.words = words;
  kept_ = placeholders_.kept();
  placeholders_.note_cleared();
  for (const core::LeafIndex leaf : leaves().indices()) {
    for (const core::ParameterIndex part : leaves()[leaf].parameters) {
      input.has_gradient.push_back(kept_[leaf] && executor_.has_gradient(part));
      input.has_cleared.push_back(placeholders_.cleared()[leaf]);
    }
  }
  verdict_.reset();
  Agreed agreed = engine::agree(mesh().words, input);
  placeholders_.forget_cleared();
  for (const core::ParameterIndex part : parameters().indices()) {
    core::require(
        !(agreed.has_gradient[part] && agreed.has_cleared[part]),
        "dmuon: some ranks have cleared the gradient of '", parameters()[part].name,
        "' behind their last backward, others have kept it. Expected: all ranks clear it, "
        "or none.");
  }
  verdict_ = Verdict{std::move(agreed.has_gradient), words.narrow(0, 0, at.maxima()),
                     words.narrow(0, at.maxima(), at.num_maxima), at, agreed.has_open_gradients};
  // Elsewhere they travel on the device, once all ranks are known to step the same model: messages
  // of two models differ in length.
  if (!words.is_cpu()) executor_.max_over_mesh(words, "the norms");
  norms_.keep_only(verdict_->has_gradient);
  return *verdict_;
}

void Engine::clear_gradient(core::LeafIndex leaf) {
  verdict_.reset();
  resolver_.finish_routes();  // what is on its way would come back
  placeholders_.forget_gradient(leaf);
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

void Engine::begin_new_weights() {
  settle();
  finish_update();
  has_second_order_ = false;
  executor_.profile().set_phase(Phase::kStep);
}

void Engine::step(std::shared_ptr<Update> update) {
  begin_new_weights();
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
  begin_new_weights();
  resolver_.publish();
}

void Engine::compute_with(const std::string& name, const std::string& call) {
  if (name == computes_with_) return;
  const std::string& other = name == wire::kMaster ? computes_with_ : name;
  meet(call);
  drain();  // publications read masters
  {
    const wire::PlainMode plain;
    owned().exchange(wire::kMaster, other);
  }
  computes_with_ = name;
  publish();
}

}  // namespace dmuon::engine
