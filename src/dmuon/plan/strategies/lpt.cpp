#include "dmuon/balance/construct.h"
#include "dmuon/core/error.h"
#include "dmuon/plan/placement.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::plan::strategies {

// Longest processing time first, matrix by matrix at what one alone takes: what is done where
// batches are not known of. For ablation.
Owners lpt(const Problem& problem) {
  auto assignment = balance::longest_first(problem.balance, 1);
  if (!assignment) assignment = balance::fewest_bytes(problem.balance);
  core::require(assignment.has_value(), "lpt: max_memory_bytes leaves a matrix without an owner");
  return {place(problem.inventory, problem.groups, *assignment, problem.mesh, problem.options)};
}

}  // namespace dmuon::plan::strategies
