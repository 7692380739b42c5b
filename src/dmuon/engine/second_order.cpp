// Gradients of gradients: backwards that create a graph, and those that follow them.

#include <algorithm>
#include <string>

#include "dmuon/core/error.h"
#include "dmuon/engine/autograd.h"
#include "dmuon/engine/engine.h"

namespace dmuon::engine {

using schedule::Pass;

// Nodes of both graphs come in an order that each rank's threads decide. So the kept weights of a
// unit have no uses, and its gradients leave at the backward's end.
bool Engine::follows_second_order(core::UnitIndex index) const {
  return in_backward() && has_second_order_ && ready(index);
}

std::string Engine::why_no_second_order() const {
  const auto& units = layout().units;
  if (std::any_of(units.begin(), units.end(), [](const auto& unit) { return unit.host; })) {
    return "dmuon: a backward with create_graph=True under fully_shard: FSDP2 gives wrong "
           "gradients of gradients. Expected: dmuon without fully_shard, and dedicate_params(..., "
           "reshard_after_forward=False).";
  }
  if (options_.step.reshard_after_forward) {
    return "dmuon: a backward with create_graph=True: a later backward reads the weights, which "
           "are freed after this one. Expected: dedicate_params(..., reshard_after_forward=False).";
  }
  return {};
}

// A backward with create_graph=True is no pass: units keep their weights, which the graph reads in
// the backward after it.
void Engine::enter_second_order() {
  core::require(no_backward_.empty(), no_backward_);
  const std::string why = why_no_second_order();
  core::require(why.empty(), why);
  second_order_ = this_backward();
  has_second_order_ = true;
}

// The first that happens in a backward may be a recomputation, or a read in a backward that creates
// a graph: both enable gradients. If the graph and the weights are kept, it is left out: these
// weights are there, and a backward that is a pass opens it at its first gradient.
bool Engine::in_second_order(core::UnitIndex index) {
  if (!in_backward() || backward_is_open() || !ready(index)) return false;
  if (creates_graph() && keeps_graph() && why_no_second_order().empty()) enter_second_order();
  return this_backward() == second_order_;
}

}  // namespace dmuon::engine
