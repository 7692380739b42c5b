#pragma once

#include <optional>
#include <vector>

#include "dmuon/balance/certificate.h"
#include "dmuon/balance/owner_time.h"
#include "dmuon/balance/patterns.h"

namespace dmuon::balance {

/// How many owners, in fractions, it takes to do all work within a limit, each following some
/// pattern: column generation over the patterns. It proves limits impossible, and its patterns are
/// good building blocks.
class PatternLp {
 public:
  explicit PatternLp(const Problem& problem) : problem_(&problem) {}

  /// Patterns that later solutions may use from the start.
  void know(const Pattern& pattern);

  struct Question {
    Nanoseconds limit = 0;          ///< > 0
    std::vector<int> num_matrices;  ///< [shapes] the work to be done
    double num_owners = 0;          ///< with fewer than that, or as many, the question is answered
    bool work_rows = true;  ///< also: the patterns' times must add up to f_s(n_s) of every shape
  };

  struct Use {
    const Pattern* pattern;  ///< valid until the next solve
    double amount;
  };

  struct Answer {
    bool impossible = false;  ///< some matrix takes longer than the limit, or `proof` holds
    std::optional<Certificate>
        proof;              ///< that the instance's owners cannot do it; bound = limit + 1
    std::vector<Use> uses;  ///< of patterns, in fractions, amounts > 0
  };

  /// A proof is looked for only if the question is about all matrices of the instance.
  Answer solve(const Question& question);

  int num_rounds() const { return num_rounds_; }

 private:
  class Solver;

  const Problem* problem_;
  std::vector<Pattern> patterns_;
  int num_rounds_ = 0;  // of column generation, over all questions
};

}  // namespace dmuon::balance
