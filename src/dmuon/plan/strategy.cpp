#include "dmuon/plan/strategy.h"

#include "dmuon/core/error.h"
#include "dmuon/core/text.h"

// A new strategy is a file in strategies/ that defines dmuon::plan::strategies::<name>, and its
// name here.
#define DMUON_STRATEGIES(entry) \
  entry(load_balance) entry(lpt) entry(round_robin) entry(rank0) entry(xor_layout)

namespace dmuon::plan {
namespace strategies {

#define DMUON_DECLARE(name) Owners name(const Problem& problem);
DMUON_STRATEGIES(DMUON_DECLARE)
#undef DMUON_DECLARE

}  // namespace strategies

namespace {

struct Entry {
  std::string_view name;
  Strategy strategy;
};

#define DMUON_ENTRY(name) Entry{#name, strategies::name},
constexpr Entry kStrategies[] = {DMUON_STRATEGIES(DMUON_ENTRY)};
#undef DMUON_ENTRY

}  // namespace

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kStrategies) names.emplace_back(entry.name);
  return names;
}

Strategy find_strategy(std::string_view name) {
  for (const Entry& entry : kStrategies) {
    if (entry.name == name) return entry.strategy;
  }
  throw core::InvalidArgument(core::message("find_strategy: strategy must be one of ",
                                            core::joined(strategy_names()), "; got '", name, "'"));
}

}  // namespace dmuon::plan
