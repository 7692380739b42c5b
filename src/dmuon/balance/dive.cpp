#include <algorithm>
#include <cmath>

#include "dmuon/balance/construct.h"
#include "dmuon/balance/pattern_lp.h"

namespace dmuon::balance {
namespace {

int whole(double amount) { return static_cast<int>(std::floor(amount + 1e-7)); }

class Dive {
 public:
  Dive(PatternLp& lp, const Problem& problem, Nanoseconds limit, bool work_rows)
      : lp_(lp),
        assignment_(problem),
        limit_(limit),
        work_rows_(work_rows),
        left_(problem.num_matrices()) {}

  std::optional<Assignment> result() {
    while (problem().owners().contains(next_owner_) && any_left()) {
      const PatternLp::Answer answer =
          lp_.solve({.limit = limit_, .num_matrices = left_, .work_rows = work_rows_});
      if (answer.impossible || answer.uses.empty()) break;
      if (!give_whole(answer) && !give(largest_part(answer).pattern)) break;
    }
    return finish();
  }

 private:
  const Problem& problem() const { return assignment_.problem(); }
  bool any_left() const {
    return std::any_of(left_.begin(), left_.end(), [](int left) { return left > 0; });
  }

  // Gives each pattern to as many owners as the program says, rounded down. After the first owner,
  // stops as soon as the remaining matrices do not fill the whole pattern.
  bool give_whole(const PatternLp::Answer& answer) {
    bool any = false;
    for (const PatternLp::Use& use : answer.uses) {
      for (int times = whole(use.amount); times > 0; --times) {
        if (any && !all_left(use.pattern)) break;
        if (!give(use.pattern)) break;
        any = true;
      }
    }
    return any;
  }

  static const PatternLp::Use& largest_part(const PatternLp::Answer& answer) {
    const auto part = [](const PatternLp::Use& use) { return use.amount - whole(use.amount); };
    return *std::max_element(answer.uses.begin(), answer.uses.end(),
                             [&](const auto& a, const auto& b) { return part(a) < part(b); });
  }

  bool all_left(const Pattern& pattern) const {
    return std::equal(pattern.begin(), pattern.end(), left_.begin(), std::less_equal<>());
  }

  // Gives the pattern's remaining matrices to the next owner. Returns false if none fits.
  bool give(const Pattern& pattern) {
    if (!problem().owners().contains(next_owner_)) return false;
    bool any = false;
    for (const ShapeIndex s : problem().shapes()) {
      const int k = std::min(pattern[s], left_[s]);
      if (k == 0 || !assignment_.fits(next_owner_, s, k)) continue;
      assignment_.add(next_owner_, s, k);
      left_[s] -= k;
      any = true;
    }
    if (any) ++next_owner_;
    return any;
  }

  // Gives each matrix that no pattern took to the cheapest owner.
  std::optional<Assignment> finish() {
    for (const ShapeIndex s : problem().shapes()) {
      for (; left_[s] > 0; --left_[s]) {
        if (!add_where_cheapest(assignment_, s)) return std::nullopt;
      }
    }
    return assignment_;
  }

  PatternLp& lp_;
  Assignment assignment_;
  Nanoseconds limit_;
  bool work_rows_;
  PerShape<int> left_;
  Owner next_owner_;
};

}  // namespace

std::optional<Assignment> PatternLp::dive(Nanoseconds limit, bool work_rows) {
  return Dive(*this, *problem_, limit, work_rows).result();
}

}  // namespace dmuon::balance
