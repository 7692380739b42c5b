#include <algorithm>
#include <utility>
#include <vector>

#include "dmuon/plan/balance.h"
#include "dmuon/plan/placement.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan::strategies {
namespace {

// How much of a makespan one piece may take. 0 deals single matrices, which spreads them best;
// larger pieces keep batches together, which wins where sharing launches matters more than balance.
constexpr double kPieceShares[] = {0.0, 0.125, 0.25, 0.5, 1.0};
// Makespan given up for smaller pieces: they put the matrices of a unit on more columns.
constexpr double kSpreadTolerance = 0.01;

struct Candidate {
  std::vector<int> piece_sizes;
  Balance balance;
};

// A deal and its local search for each share of `makespan_seconds` that cuts new pieces.
void add_candidates(const Problem& problem, double makespan_seconds,
                    std::vector<Candidate>& candidates) {
  for (const double share : kPieceShares) {
    std::vector<int> sizes = piece_sizes(problem.groups, problem.costs, share * makespan_seconds);
    const bool known =
        std::any_of(candidates.begin(), candidates.end(),
                    [&](const Candidate& candidate) { return candidate.piece_sizes == sizes; });
    if (known) continue;
    Balance balance(problem.costs, problem.mesh);
    balance.deal(problem.groups, sizes);
    balance.improve();
    candidates.push_back({std::move(sizes), std::move(balance)});
  }
}

double best_makespan(const std::vector<Candidate>& candidates) {
  double best = candidates.front().balance.makespan_seconds();
  for (const Candidate& candidate : candidates) {
    best = std::min(best, candidate.balance.makespan_seconds());
  }
  return best;
}

}  // namespace

// First how many matrices of each shape a slot gets, then which. Pieces are measured by the lower
// bound and, as that may be far below what a batch takes, by the best makespan then known. The
// first pass deals single matrices, so the result is no slower than LPT.
std::vector<int> load_balance(const Problem& problem) {
  std::vector<Candidate> candidates;
  add_candidates(problem,
                 lower_bound_seconds(problem.groups, problem.costs, problem.mesh.num_slots()),
                 candidates);
  add_candidates(problem, best_makespan(candidates), candidates);
  const double good_enough = best_makespan(candidates) * (1 + kSpreadTolerance);
  const auto chosen =
      std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& candidate) {
        return candidate.balance.makespan_seconds() <= good_enough;
      });
  return place(problem.inventory, problem.groups, chosen->balance.counts(), problem.mesh);
}

}  // namespace dmuon::plan::strategies
