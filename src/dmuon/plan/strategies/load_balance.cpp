#include <utility>

#include "dmuon/balance/solve.h"
#include "dmuon/plan/placement.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan::strategies {
namespace {

// Distinct columns of a window that are worth giving up balance for.
constexpr double kWorthwhile = 0.1;

struct Candidate {
  std::vector<int> owner;
  double distinct_columns;
};

Candidate placed(const Problem& problem, const balance::Assignment& assignment) {
  std::vector<int> owner =
      place(problem.inventory, problem.groups, assignment, problem.mesh, problem.options);
  const Spread found = spread(problem.inventory, problem.mesh, owner, problem.options);
  return {std::move(owner), found.distinct_columns};
}

}  // namespace

// eq:owner_assignment: how many matrices of each shape an owner gets, then which. Within the layout
// slack, an assignment that spreads better is taken instead; nothing is given up on one node, where
// no two columns share a network.
Owners load_balance(const Problem& problem) {
  const balance::Solution solution = balance::solve(problem.balance);
  Candidate best = placed(problem, solution.assignment);
  const bool may_gain = best.distinct_columns + kWorthwhile <= problem.mesh.num_shards;
  if (problem.mesh.num_replicates > 1 && problem.options.layout_slack > 0 && may_gain) {
    const auto makespan = static_cast<double>(solution.assignment.makespan());
    const auto limit =
        static_cast<balance::Nanoseconds>(makespan * (1 + problem.options.layout_slack));
    for (const balance::Assignment& other : balance::alternatives(problem.balance, limit)) {
      Candidate candidate = placed(problem, other);
      if (candidate.distinct_columns >= best.distinct_columns + kWorthwhile) {
        best = std::move(candidate);
      }
    }
  }
  return {std::move(best.owner), solution.certificate};
}

}  // namespace dmuon::plan::strategies
