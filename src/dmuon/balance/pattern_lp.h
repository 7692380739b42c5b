#pragma once

#include <optional>
#include <vector>

#include "dmuon/balance/assignment.h"
#include "dmuon/balance/certificate.h"
#include "dmuon/balance/patterns.h"

namespace dmuon::balance {

/// Finds the number of owners, in fractions, that do all work within a limit if each follows some
/// pattern. Works by column generation over the patterns. It proves limits impossible, and its
/// patterns are good building blocks. Not thread-safe: each solve() adds patterns for later ones.
class PatternLp {
 public:
  explicit PatternLp(const Problem& problem) : problem_(&problem) {}

  struct Question {
    Nanoseconds limit = 0;       ///< > 0
    PerShape<int> num_matrices;  ///< the work to be done
    double num_owners = 0;       ///< the search ends when so many suffice; 0: at the fewest
    bool work_rows = true;  ///< also: the patterns' times must add up to f_s(n_s) of every shape
  };

  struct Use {
    Pattern pattern;
    double amount = 0;
  };

  struct Answer {
    /// No patterns were found that do all work: a matrix takes longer than the limit, `proof` is
    /// set, or the search gave up, which happens only if some batch takes no time.
    bool impossible = false;
    /// Proves that the instance's owners cannot do the work; bound = limit + 1.
    std::optional<Certificate> proof;
    std::vector<Use> uses;  ///< of patterns, in fractions, amounts > 0
  };

  /// Looks for a proof only if the question is about all matrices of the instance. Rounds loads
  /// more finely if `num_owners` is given.
  Answer solve(const Question& question);

  /// Rounds the patterns down, owner by owner, and solves again for the remaining work ("dive").
  /// @return nothing if max_bytes leaves a matrix without an owner.
  std::optional<Assignment> dive(Nanoseconds limit, bool work_rows);

  int num_rounds() const { return num_rounds_; }

 private:
  const Problem* problem_;
  std::vector<Pattern> patterns_;  // later questions begin with them
  int num_rounds_ = 0;             // of column generation, over all questions
};

}  // namespace dmuon::balance
