// How a trigger becomes operations: what the order says is crossed, compared where no trace
// confirms it, and its operations performed.

#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/engine/engine.h"
#include "dmuon/engine/stopwatch.h"

namespace dmuon::engine {
namespace {

using schedule::Crossing;
using schedule::Moment;
using schedule::Pass;

// Stands for a moment where a pass ends: a rank that wants more
// triggers than the others then meets this one, and all of them can say so.
constexpr int kEndOfPass = -1;

std::string wish(std::int64_t moment, std::int64_t unit, Executor& executor) {
  if (moment == kEndOfPass) return "the end of the pass";
  constexpr const char* kMoments[] = {"the use of", "the end of the forward of",
                                      "the end of the backward of"};
  const bool known = unit >= 0 && unit < executor.num_units() && moment >= 0 && moment < 3;
  if (!known) return "?";
  return core::message(kMoments[moment], " '", executor.unit(static_cast<int>(unit)).name(), "'");
}

}  // namespace

void Engine::compare(int moment, int unit) {
  Stopwatch watch(seconds_["compare_s"]);
  const auto pass = order_.current() ? static_cast<std::int64_t>(*order_.current()) : -1;
  const auto all = groups().order.all_gather({pass, moment, unit, num_compared_++},
                                             "the comparison of a traced step");
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw core::InvalidArgument(
        core::message("dmuon: ranks disagree in a traced step: rank 0 of the mesh is at ",
                      wish(all[0][1], all[0][2], executor_), ", rank ", rank, " is at ",
                      wish(all[rank][1], all[rank][2], executor_),
                      ". Expected: in the first step, and in a step that uses modules in a new "
                      "order, all ranks use the same "
                      "modules in the same order. Later a rank may skip modules."));
  }
}

void Engine::cross(const std::vector<Crossing>& crossings) {
  for (const Crossing& crossing : crossings) {
    if (crossing.compare())
      compare(static_cast<int>(crossing.trigger.moment), crossing.trigger.unit);
    issued_.add(static_cast<std::int64_t>(crossing.trigger.moment))
        .add(std::int64_t{crossing.trigger.unit});
    if (crossing.compare()) {
      serve(crossing.trigger);
      continue;
    }
    const schedule::PassSchedule* pass = &schedule_.forward;
    if (crossing.pass == Pass::kEvalForward) pass = &evaluation_;
    if (crossing.pass == Pass::kBackward)
      pass = sync_ ? &schedule_.backward : &schedule_.backward_no_sync;
    perform(pass->at.at(static_cast<std::size_t>(crossing.position)));
  }
}

void Engine::perform(const std::vector<schedule::Operation>& operations) {
  for (const schedule::Operation& operation : operations) executor_.perform(operation);
}

void Engine::serve(schedule::Trigger trigger) {
  perform(schedule::serve_on_demand(executor_.layout(), trigger, sync_));
}

void Engine::request(Moment moment, int unit) { cross(order_.request({moment, unit})); }

void Engine::end_pass() {
  if (!order_.current()) return;
  const bool traced = order_.on_demand();
  if (traced) compare(kEndOfPass, 0);
  cross(order_.end_pass());
  if (traced) rebuild_schedule();
}

// Passes are traced one after the other, and the parts that a new trace does not touch come out as
// they were.
void Engine::rebuild_schedule() {
  const schedule::Layout& layout = executor_.layout();
  const schedule::Options& options = executor_.options().schedule;
  const schedule::Trace& forward = order_.trace(Pass::kTrainForward);
  const schedule::Trace& evaluation = order_.trace(Pass::kEvalForward);
  schedule_ = schedule::build_step_schedule(layout, forward, order_.trace(Pass::kBackward),
                                            executor_.units_of_batches(), options);
  evaluation_ =
      schedule::build_pass_schedule(layout, evaluation, evaluation, Pass::kEvalForward, options);
  issued_.add(static_cast<std::int64_t>(schedule_.hash()));
}

}  // namespace dmuon::engine
