#include "dmuon/balance/solve.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "dmuon/balance/construct.h"
#include "dmuon/balance/exchange.h"
#include "dmuon/balance/pattern_lp.h"
#include "dmuon/core/error.h"

namespace dmuon::balance {
namespace {

// Searches end this close to the bound: smaller gains are not worth a millisecond.
Nanoseconds good_enough(Nanoseconds bound) { return bound + bound / 500; }

// Limits on counted work: about a second on the largest instances.
constexpr int kLots[] = {2, 4, 8, 16};
constexpr int kMaxExchanges = 400;
constexpr int kDivePerMille[] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 25, 30};
constexpr int kMaxDiveRounds = 600;

// Keeps the best assignment seen.
class Best {
 public:
  explicit Best(Nanoseconds target) : target_(target) {}

  void offer(std::optional<Assignment> assignment) {
    if (!assignment) return;
    exchange(*assignment, target_, kMaxExchanges);
    if (!best_ || assignment->makespan() < best_->makespan()) best_ = std::move(assignment);
  }

  void set_target(Nanoseconds target) { target_ = target; }
  bool found() const { return best_.has_value(); }
  bool reached() const { return found() && best_->makespan() <= target_; }
  Assignment& operator*() { return *best_; }
  Assignment* operator->() { return &*best_; }

 private:
  Nanoseconds target_;
  std::optional<Assignment> best_;
};

void construct(const Problem& problem, Best& best) {
  best.offer(least_loaded(problem));
  best.offer(longest_first(problem, 1));
  if (!best.reached()) best.offer(even(problem));
  for (const int lot : kLots) {
    if (!best.reached()) best.offer(longest_first(problem, lot));
  }
  if (!best.found()) best.offer(fewest_bytes(problem));
}

// Raises the bound: halves the span between an impossible limit and one possible in fractions.
// @param high in: the makespan of some assignment; out: the smallest limit found possible.
void raise(PatternLp& lp, const Problem& problem, Certificate& bound, Nanoseconds& high) {
  PatternLp::Question question{.num_matrices = problem.num_matrices(),
                               .num_owners = static_cast<double>(problem.num_owners())};
  Nanoseconds low = bound.bound - 1;
  while (high - low > std::max<Nanoseconds>(1, high / 2000)) {
    question.limit = low + (high - low) / 2;
    if (question.limit <= 0) break;
    PatternLp::Answer answer = lp.solve(question);
    if (answer.proof) {
      bound = *std::move(answer.proof);
      low = question.limit;
    } else {
      high = question.limit;
    }
  }
}

void dive_at_all_limits(PatternLp& lp, Nanoseconds lowest, Best& best) {
  const int max_rounds = lp.num_rounds() + kMaxDiveRounds;
  for (const int per_mille : kDivePerMille) {
    for (const bool work_rows : {true, false}) {
      const Nanoseconds limit = lowest + lowest / 1000 * per_mille;
      if (best.reached() || lp.num_rounds() > max_rounds || limit >= best->makespan()) return;
      best.offer(lp.dive(limit, work_rows));
    }
  }
}

}  // namespace

Certificate lower_bound(const Problem& problem, Nanoseconds upper) {
  Certificate bound = simple_bound(problem);
  PatternLp lp(problem);
  raise(lp, problem, bound, upper);
  return bound;
}

Solution solve(const Problem& problem) {
  Certificate bound = simple_bound(problem);
  Best best(bound.bound + bound.bound / 1000);
  construct(problem, best);
  if (!best.found()) {
    core::refuse("balance: max_bytes must let every matrix have an owner; ",
                 problem.instance().max_bytes, " do not. With ", sufficient_bytes(problem),
                 " there is an assignment");
  }
  PatternLp lp(problem);
  Nanoseconds possible = best->makespan();
  raise(lp, problem, bound, possible);
  best.set_target(good_enough(bound.bound));
  if (!best.reached()) dive_at_all_limits(lp, std::max(possible, bound.bound), best);
  return {std::move(*best), std::move(bound)};
}

std::vector<Assignment> alternatives(const Problem& problem, Nanoseconds limit) {
  std::vector<std::optional<Assignment>> starts = {even(problem), least_loaded(problem),
                                                   longest_first(problem, 1)};
  for (const int lot : kLots) starts.push_back(longest_first(problem, lot));
  std::vector<Assignment> found;
  for (std::optional<Assignment>& start : starts) {
    if (!start) continue;
    exchange(*start, limit, kMaxExchanges);
    if (start->makespan() <= limit) found.push_back(*std::move(start));
  }
  return found;
}

std::int64_t sufficient_bytes(const Problem& problem) {
  Instance unlimited = problem.instance();
  unlimited.max_bytes = Instance{}.max_bytes;
  return fewest_bytes(Problem(unlimited))->most_bytes();
}

}  // namespace dmuon::balance
