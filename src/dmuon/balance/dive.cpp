#include <algorithm>
#include <cmath>
#include <numeric>

#include "dmuon/balance/construct.h"
#include "dmuon/balance/pattern_lp.h"

namespace dmuon::balance {
namespace {

class Dive {
 public:
  Dive(PatternLp& lp, const Problem& problem, Nanoseconds limit, bool work_rows)
      : lp_(lp), assignment_(problem), limit_(limit), work_rows_(work_rows) {
    for (int s = 0; s < problem.num_shapes(); ++s) left_.push_back(problem.num_matrices(s));
  }

  std::optional<Assignment> result() {
    while (next_owner_ < problem().num_owners() && any_left()) {
      const PatternLp::Answer answer =
          lp_.solve({.limit = limit_, .num_matrices = left_, .work_rows = work_rows_});
      if (answer.impossible || answer.uses.empty()) break;
      if (!give_whole(answer) && !give(largest_part(answer).pattern)) break;
    }
    return finish();
  }

 private:
  const Problem& problem() const { return assignment_.problem(); }
  bool any_left() const { return std::accumulate(left_.begin(), left_.end(), std::int64_t{0}) > 0; }

  // As many owners follow a pattern as the program says, rounded down. Beyond the first, only while
  // all of the pattern is left to be given.
  bool give_whole(const PatternLp::Answer& answer) {
    bool any = false;
    for (const PatternLp::Use& use : answer.uses) {
      const auto times = static_cast<int>(std::floor(use.amount + 1e-7));
      for (int i = 0; i < times && next_owner_ < problem().num_owners(); ++i) {
        if (any && !all_left(use.pattern)) break;
        if (!give(use.pattern)) break;
        any = true;
      }
    }
    return any;
  }

  static const PatternLp::Use& largest_part(const PatternLp::Answer& answer) {
    const auto part = [](const PatternLp::Use& use) {
      return use.amount - std::floor(use.amount + 1e-7);
    };
    return *std::max_element(answer.uses.begin(), answer.uses.end(),
                             [&](const auto& a, const auto& b) { return part(a) < part(b); });
  }

  bool all_left(const Pattern& pattern) const {
    for (std::size_t s = 0; s < left_.size(); ++s) {
      if (pattern[s] > left_[s]) return false;
    }
    return true;
  }

  // What is left of the pattern, to the next owner; false if that is nothing or does not fit.
  bool give(const Pattern& pattern) {
    bool any = false;
    for (int s = 0; s < problem().num_shapes(); ++s) {
      const int k =
          std::min(pattern[static_cast<std::size_t>(s)], left_[static_cast<std::size_t>(s)]);
      if (k == 0 || !assignment_.fits(next_owner_, s, k)) continue;
      assignment_.add(next_owner_, s, k);
      left_[static_cast<std::size_t>(s)] -= k;
      any = true;
    }
    next_owner_ += any ? 1 : 0;
    return any;
  }

  // What no pattern took goes where it costs least.
  std::optional<Assignment> finish() {
    for (int s = 0; s < problem().num_shapes(); ++s) {
      for (; left_[static_cast<std::size_t>(s)] > 0; --left_[static_cast<std::size_t>(s)]) {
        const int owner = cheapest_owner(assignment_, s);
        if (owner < 0) return std::nullopt;
        assignment_.add(owner, s, 1);
      }
    }
    return assignment_;
  }

  PatternLp& lp_;
  Assignment assignment_;
  Nanoseconds limit_;
  bool work_rows_;
  std::vector<int> left_;  // [shapes]
  int next_owner_ = 0;
};

}  // namespace

std::optional<Assignment> PatternLp::dive(Nanoseconds limit, bool work_rows) {
  return Dive(*this, *problem_, limit, work_rows).result();
}

}  // namespace dmuon::balance
