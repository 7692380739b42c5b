// All ranks are at the same trigger, or none goes on: what a traced pass compares before it issues.

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "dmuon/engine/stopwatch.h"

namespace dmuon::engine {
namespace {

// Stands for a moment where a pass ends: a rank that wants more triggers than the others then meets
// this one, and all of them can say so.
constexpr int kEndOfPass = -1;
constexpr int kNoPass = -1;

std::string wish(std::int64_t moment, std::int64_t unit, const schedule::Layout& layout) {
  if (moment == kEndOfPass) return "the end of a pass";
  constexpr const char* kMoments[] = {"the use of", "the end of the forward of",
                                      "the end of the backward of"};
  const core::UnitIndex index(unit);
  const bool known = layout.units.contains(index) && moment >= 0 && moment < 3;
  if (!known) return "?";
  return core::message(kMoments[moment], " '", layout.units[index].name, "'");
}

}  // namespace

void Engine::compare(const std::optional<schedule::Trigger>& trigger) {
  Stopwatch watch(seconds_["compare_s"]);
  const std::optional<schedule::Pass> open = resolver_.order().current();
  const std::int64_t pass = open ? static_cast<int>(*open) : kNoPass;
  const std::int64_t moment = trigger ? static_cast<int>(trigger->moment) : kEndOfPass;
  const std::int64_t unit = trigger ? trigger->unit.value() : 0;
  const auto all = mesh().order.all_gather({pass, moment, unit, num_compared_++},
                                           "the comparison of a traced step");
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw core::InvalidArgument(
        core::message("dmuon: ranks disagree in a traced step: rank 0 of the mesh is at ",
                      wish(all[0][1], all[0][2], layout()), ", rank ", rank, " is at ",
                      wish(all[rank][1], all[rank][2], layout()),
                      ". Expected: in the first step, and in a step that uses modules in a new "
                      "order, all ranks use the same "
                      "modules in the same order. Later a rank may skip modules."));
  }
}

// What others then see of a rank that is waiting inside the host framework.
void Engine::leave_to_host(const std::optional<schedule::Trigger>& use) {
  if (use && resolver_.order().current() == schedule::Pass::kBackward) host_uses_.insert(use->unit);
  leave(use ? core::message("collectives of fully_shard in '", layout().units[use->unit].name, "'")
            : std::string("collectives of fully_shard at the end of a backward"));
}

}  // namespace dmuon::engine
