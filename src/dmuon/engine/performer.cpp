// The engine as the resolver's performer. It compares on all ranks where they are; if one is at
// another place, none goes on.

#include <algorithm>
#include <array>
#include <bit>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"
#include "dmuon/engine/engine.h"
#include "dmuon/engine/stopwatch.h"
#include "dmuon/wire/plain_mode.h"

namespace dmuon::engine {
namespace {

using Words = std::array<std::int64_t, 4>;

// These stand for a moment. A rank with more triggers than the others meets their end of the pass,
// so that all of them can report it. A call lies outside of passes; its unit is a hash of its name.
constexpr int kEndOfPass = -1;
constexpr int kCall = -2;
// Less than these: a change of a unit's weights. Its unit is a checksum of the weights.
constexpr int kChangeOfUnit0 = -100;
constexpr int kNoPass = -1;
constexpr int kModelShift = 40;

}  // namespace

// The words that ranks compare. At the end of a pass, the length of the crossed trace takes the
// unit's place: a unit can be used several times, and ranks may end at different uses.
struct Engine::Compared {
  std::int64_t pass;
  std::int64_t moment;
  std::int64_t unit;
  std::int64_t count;  // of comparisons before, with the model's number above it

  bool is_call() const { return moment == kCall; }
  bool changes_weights() const { return moment <= kChangeOfUnit0; }
  std::int64_t model() const { return count >> kModelShift; }
  bool operator==(const Compared&) const = default;
};

namespace {

constexpr const char* kSameOrder = "all ranks use the models of a mesh in the same order.";
constexpr const char* kSameCalls = "what is collective is called on all ranks.";
constexpr const char* kSameChange =
    "a module that changes its weights in its forward changes them alike on all ranks.";
constexpr const char* kSameModules =
    "in the first step, and in a step that uses modules in a new order, or one of them more or "
    "less often, all ranks use the same modules in the same order. Later a rank may skip modules "
    "in which fully_shard manages nothing.";

}  // namespace

std::string Engine::described(const Compared& compared) const {
  const auto [pass, moment, unit, count] = compared;
  if (compared.is_call()) return "another call";
  if (moment == kEndOfPass) return pass == kNoPass ? "the next forward" : "the end of a pass";
  const auto& units = layout().units;
  if (compared.changes_weights()) {
    const core::UnitIndex changed(kChangeOfUnit0 - moment);
    return core::message("a change of weights of '",
                         units.contains(changed) ? units[changed].name : "?",
                         "' in a forward, to values with checksum ", unit);
  }
  constexpr const char* kMoments[] = {"the use of", "the end of the forward of",
                                      "the end of the backward of"};
  const core::UnitIndex index(unit);
  const bool known = units.contains(index) && moment >= 0 && moment < 3;
  if (!known) return "?";
  const bool evaluates = pass == static_cast<int>(schedule::Pass::kEvalForward);
  return core::message(kMoments[moment], " '", units[index].name, "'",
                       evaluates ? " in an evaluation forward" : "");
}

Engine::Compared Engine::compared(std::int64_t moment, std::int64_t unit) {
  const std::optional<schedule::Pass> open = resolver_.order().current();
  return {open ? static_cast<int>(*open) : kNoPass, moment, unit,
          num_compared_++ + (std::int64_t{executor_.model()} << kModelShift)};
}

void Engine::compare(const std::optional<schedule::Trigger>& trigger) {
  const Compared here = trigger ? compared(static_cast<int>(trigger->moment), trigger->unit.value())
                                : compared(kEndOfPass, resolver_.order().position());
  require_all_at(here, described(here));
}

void Engine::meet(const std::string& call) {
  settle();
  finish_update();
  const auto name = static_cast<std::int64_t>(core::Hasher().add(call).value());
  require_all_at(compared(kCall, name), call);  // settled, so in no pass
}

void Engine::take_back(core::UnitIndex index, std::int64_t checksum) {
  const Compared here = compared(kChangeOfUnit0 - index.value(), checksum);
  require_all_at(here, described(here));
  finish_update();
  executor_.take_back(index);
}

void Engine::require_all_at(const Compared& here, const std::string& what) {
  mesh().turn->require();
  Stopwatch watch(seconds_["compare_s"]);
  const wire::PlainMode plain;
  const std::string where = what + " " + executor_.when();
  std::vector<Compared> all;
  for (const Words& words :
       mesh().words.all_gather(std::bit_cast<Words>(here), watch::Rendezvous::kComparison, where))
    all.push_back(std::bit_cast<Compared>(words));
  const auto text = [&](const Compared& of) {
    if (of.model() != here.model()) return core::message("a use of model ", of.model());
    return of == here ? what : described(of);
  };
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const bool calls = all[0].is_call() || all[rank].is_call();
    const bool changes = all[0].changes_weights() || all[rank].changes_weights();
    const char* expected = all[0].model() != all[rank].model() ? kSameOrder
                           : calls                             ? kSameCalls
                           : changes                           ? kSameChange
                                                               : kSameModules;
    const std::string why = core::message(
        "dmuon: ranks disagree ", executor_.when(), ": rank 0 of the mesh is at ", text(all[0]),
        ", rank ", rank, " is at ", text(all[rank]), ". Expected: ", expected);
    // Between passes all have issued the same.
    const auto in_pass = [](const Compared& of) { return of.pass != kNoPass; };
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
