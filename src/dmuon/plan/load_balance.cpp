#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "dmuon/balance/construct.h"
#include "dmuon/balance/solve.h"
#include "dmuon/plan/placement.h"
#include "dmuon/plan/spread.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan {
namespace {

// Distinct columns of a window that justify spending all of the layout slack; a part, so much less.
constexpr double kWorth = 0.4;

// A search ends as soon as it is within its limit, so limits inside the slack are tried too.
constexpr int kNumParts = 8;

struct Candidate {
  PerParameter<Owner> owner;
  double columns = 0;  // distinct ones, less the price of the slack spent on them
};

Candidate placed(const Problem& problem, const balance::Assignment& assignment, double spent) {
  PerParameter<Owner> owner =
      place(problem.inventory, problem.groups, assignment, problem.mesh, problem.options);
  const Spread found = spread(problem.inventory, problem.mesh, owner, problem.options);
  return {std::move(owner), found.distinct_columns - kWorth * spent};
}

std::vector<int> counts_of(const balance::Assignment& assignment) {
  std::vector<int> counts;
  for (const Owner owner : assignment.problem().owners()) {
    const auto& of_owner = assignment.counts(owner);
    counts.insert(counts.end(), of_owner.begin(), of_owner.end());
  }
  return counts;
}

// Returns the fastest of lpt, round_robin and xor_layout, or none if no one has room for all state.
std::optional<balance::Assignment> simplest(const Problem& problem) {
  std::optional<balance::Assignment> fastest = balance::longest_first(problem.balance, 1);
  for (const auto strategy : {round_robin, xor_layout}) {
    const PerParameter<Owner> owner = strategy(problem).owner;
    balance::Assignment assignment(problem.balance);
    for (const ParameterIndex w : owner.indices()) {
      assignment.add(owner[w], problem.groups.shape_of[w], 1);
    }
    if (assignment.most_bytes() > problem.balance.instance().max_bytes) continue;
    if (!fastest || assignment.makespan() < fastest->makespan()) fastest = std::move(assignment);
  }
  return fastest;
}

}  // namespace

Decision load_balance(const Problem& problem) {
  balance::Solution solution = balance::solve(problem.balance);
  auto other = simplest(problem);
  const balance::Nanoseconds most = other ? other->makespan() : balance::kMaxTotalNs;
  if (most < solution.assignment.makespan()) solution.assignment = std::move(*other);
  Candidate best = placed(problem, solution.assignment, 0);
  const auto makespan = static_cast<double>(solution.assignment.makespan());
  const double slack = makespan * problem.options.layout_slack;
  if (problem.mesh.num_replicates == 1 || slack < 1) return {best.owner, solution.certificate};
  std::set<std::vector<int>> seen;  // searches within wider limits often end at the same
  for (int part = 1; part <= kNumParts && best.columns < problem.mesh.num_shards; ++part) {
    const auto limit = static_cast<balance::Nanoseconds>(makespan + slack * part / kNumParts);
    for (const auto& found : balance::alternatives(problem.balance, std::min(limit, most))) {
      if (!seen.insert(counts_of(found)).second) continue;
      const double spent = (static_cast<double>(found.makespan()) - makespan) / slack;
      Candidate candidate = placed(problem, found, spent);
      if (candidate.columns > best.columns) best = std::move(candidate);
    }
  }
  return {std::move(best.owner), solution.certificate};
}

}  // namespace dmuon::plan
