// The engine as the resolver's performer. It compares on all ranks where they are; if one is at
// another place, none goes on.

#include <algorithm>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"
#include "dmuon/engine/engine.h"
#include "dmuon/engine/stopwatch.h"
#include "dmuon/wire/plain_mode.h"

namespace dmuon::engine {
namespace {

// The compared words: the pass, the moment, the unit, and the number of comparisons before with the
// model's number above it. At the end of a pass, the length of the crossed trace takes the unit's
// place: a unit can be used several times, and ranks may end at different uses.
using Compared = std::array<std::int64_t, 4>;

// These stand for a moment. A rank with more triggers than the others meets their end of the pass,
// so that all of them can report it. A call lies outside of passes; its unit is a hash of its name.
constexpr int kEndOfPass = -1;
constexpr int kCall = -2;
// Less than these: a change of a unit's weights. Its unit is a checksum of the weights.
constexpr int kChangeOfUnit0 = -100;
constexpr int kNoPass = -1;
constexpr int kModelShift = 40;

constexpr const char* kSameOrder = "all ranks use the models of a mesh in the same order.";
constexpr const char* kSameCalls = "what is collective is called on all ranks.";
constexpr const char* kSameChange =
    "a module that changes its weights in its forward changes them alike on all ranks.";
constexpr const char* kSameModules =
    "in the first step, and in a step that uses modules in a new order, or one of them more or "
    "less often, all ranks use the same modules in the same order. Later a rank may skip modules "
    "in which fully_shard manages nothing.";

std::string described(const Compared& compared, const schedule::Layout& layout) {
  const auto [pass, moment, unit, count] = compared;
  if (moment == kCall) return "another call";
  if (moment == kEndOfPass) return pass == kNoPass ? "the next forward" : "the end of a pass";
  if (moment <= kChangeOfUnit0) {
    const core::UnitIndex changed(kChangeOfUnit0 - moment);
    const bool known = layout.units.contains(changed);
    return core::message("a change of weights of '", known ? layout.units[changed].name : "?",
                         "' in a forward, to values with checksum ", unit);
  }
  constexpr const char* kMoments[] = {"the use of", "the end of the forward of",
                                      "the end of the backward of"};
  const core::UnitIndex index(unit);
  const bool known = layout.units.contains(index) && moment >= 0 && moment < 3;
  if (!known) return "?";
  const bool evaluates = pass == static_cast<int>(schedule::Pass::kEvalForward);
  return core::message(kMoments[moment], " '", layout.units[index].name, "'",
                       evaluates ? " in an evaluation forward" : "");
}

}  // namespace

void Engine::compare(const std::optional<schedule::Trigger>& trigger) {
  const std::optional<schedule::Pass> open = resolver_.order().current();
  const Compared here{open ? static_cast<int>(*open) : kNoPass,
                      trigger ? static_cast<int>(trigger->moment) : kEndOfPass,
                      trigger ? trigger->unit.value() : resolver_.order().position(),
                      next_comparison()};
  require_all_at(here, described(here, layout()));
}

void Engine::meet(const std::string& call) {
  settle();
  finish_update();
  const auto name = static_cast<std::int64_t>(core::Hasher().add(call).value());
  require_all_at({kNoPass, kCall, name, next_comparison()}, call);
}

void Engine::take_back(core::UnitIndex index, std::int64_t checksum) {
  const std::optional<schedule::Pass> open = resolver_.order().current();
  const Compared here{open ? static_cast<int>(*open) : kNoPass, kChangeOfUnit0 - index.value(),
                      checksum, next_comparison()};
  require_all_at(here, described(here, layout()));
  finish_update();
  executor_.take_back(index);
}

std::int64_t Engine::next_comparison() {
  return num_compared_++ + (std::int64_t{executor_.model()} << kModelShift);
}

void Engine::require_all_at(const std::array<std::int64_t, 4>& here, const std::string& what) {
  mesh().turn->require();
  Stopwatch watch(seconds_["compare_s"]);
  const wire::PlainMode plain;
  const std::string where = what + " " + executor_.when();
  const std::vector<Compared> all =
      mesh().words.all_gather(here, watch::Rendezvous::kComparison, where);
  const auto model = [](const Compared& of) { return of[3] >> kModelShift; };
  const auto text = [&](const Compared& of) {
    if (model(of) != model(here)) return core::message("a use of model ", model(of));
    return of == here ? what : described(of, layout());
  };
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const bool calls = all[0][1] == kCall || all[rank][1] == kCall;
    const bool changes = std::min(all[0][1], all[rank][1]) <= kChangeOfUnit0;
    const char* expected = model(all[0]) != model(all[rank]) ? kSameOrder
                           : calls                           ? kSameCalls
                           : changes                         ? kSameChange
                                                             : kSameModules;
    const std::string why = core::message(
        "dmuon: ranks disagree ", executor_.when(), ": rank 0 of the mesh is at ", text(all[0]),
        ", rank ", rank, " is at ", text(all[rank]), ". Expected: ", expected);
    // Between passes all have issued the same.
    const auto in_pass = [](const Compared& of) { return of[0] != kNoPass; };
    if (std::ranges::any_of(all, in_pass)) mesh().end(why);
    core::refuse(why);
  }
}

void Engine::perform(const schedule::Operation& operation) {
  mesh().turn->require();
  executor_.perform(operation);
}

void Engine::before_crossing(int num_crossed) {
  if (others_.places.contains(num_crossed)) others_.send_early(num_crossed);
}

// Other ranks then see that this rank waits inside the host framework.
void Engine::leave_to_host(const std::optional<schedule::Trigger>& use) {
  const std::string where =
      use ? "in '" + layout().units[use->unit].name + "'" : "at the end of a backward";
  leave("collectives of fully_shard " + where);
}

void Engine::leave_before_forward() { leave("collectives of fully_shard before a forward"); }

}  // namespace dmuon::engine
