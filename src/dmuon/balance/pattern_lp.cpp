#include "dmuon/balance/pattern_lp.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "dmuon/balance/cover.h"

namespace dmuon::balance {
namespace {

constexpr int kProofCells = 4096;
constexpr int kDiveCells = 1536;  // where nothing is proved, in about a third of the time
constexpr int kMaxColumnRounds = 200;
// All work together is worth about this in whole prices; any pattern, far less than 2^63.
constexpr double kWholeValue = 288230376151711744.0;  // 2^58
// A shape's price of time is cut where a whole limit of it would be worth more. Any prices are
// honest, so a cut costs quality only.
constexpr std::int64_t kMaxTimeValue = std::int64_t{1} << 60;
constexpr double kConverged = 1e-6;  // of a pattern's reduced cost

// One question. Two kinds of work for each shape with matrices left: that all of them are done, and
// that their time is spent. A pattern does a share of each.
class Solver {
 public:
  Solver(const Problem& problem, const PatternLp::Question& question)
      : problem_(problem), question_(question) {
    for (int s = 0; s < problem.num_shapes(); ++s) {
      if (num_matrices(s) > 0) shapes_.push_back(s);
    }
  }

  PatternLp::Answer solve(std::vector<Pattern>& patterns, int& num_rounds) {
    PatternLp::Answer answer;
    for (const Pattern& pattern : patterns) {
      if (load(problem_, pattern) <= question_.limit) use(pattern);
    }
    answer.impossible = !use_single_shapes();
    if (answer.impossible) return answer;
    Cover cover;
    for (int round = 0; round < kMaxColumnRounds; ++num_rounds, ++round) {
      cover = cheapest_cover(shares_);
      answer.impossible = cover.amounts.size() < shares_.size();
      if (answer.impossible) break;
      double value = 0;
      for (const double amount : cover.amounts) value += amount;
      if (value <= question_.num_owners + 1e-9) break;
      const double scale = kWholeValue / std::max(1.0, value);
      const Prices prices = whole_prices(cover.prices, scale);
      PricedPattern found =
          most_valuable(problem_, prices, question_.limit, cells(), question_.num_matrices);
      if (proves(prices, found.value)) {
        answer.impossible = true;
        answer.proof = {.kind = Certificate::Kind::kPatterns,
                        .bound = question_.limit + 1,
                        .per_matrix = prices.per_matrix,
                        .per_ns = prices.per_ns,
                        .cells = cells()};
        return answer;
      }
      if (static_cast<double>(found.value) <= scale * (1 + kConverged)) break;
      use(found.pattern);
      patterns.push_back(std::move(found.pattern));
    }
    for (std::size_t p = 0; p < cover.amounts.size(); ++p) {
      if (cover.amounts[p] > 0) answer.uses.push_back({used_[p], cover.amounts[p]});
    }
    return answer;
  }

 private:
  int num_matrices(int shape) const {
    return question_.num_matrices[static_cast<std::size_t>(shape)];
  }

  Nanoseconds all_work(int shape) const { return problem_.time(shape)(num_matrices(shape)); }

  int cells() const {
    const int most = question_.num_owners > 0 ? kProofCells : kDiveCells;
    return static_cast<int>(std::min<Nanoseconds>(most, question_.limit));
  }

  // A shape that takes no time has its matrices for work, so that its time is spent with them.
  double share_of_work(int shape, int k) const {
    const Nanoseconds whole = all_work(shape);
    if (whole == 0) return static_cast<double>(k) / num_matrices(shape);
    return static_cast<double>(problem_.time(shape)(k)) / static_cast<double>(whole);
  }

  void use(const Pattern& pattern) {
    std::vector<double>& shares = shares_.emplace_back();
    for (const int s : shapes_) {
      const int k = pattern[static_cast<std::size_t>(s)];
      shares.push_back(static_cast<double>(k) / num_matrices(s));
    }
    for (const int s : shapes_) {
      if (!question_.work_rows) break;
      shares.push_back(share_of_work(s, pattern[static_cast<std::size_t>(s)]));
    }
    used_.push_back(pattern);
  }

  // For each shape a pattern of as much of it as fits, or there might be no cover.
  bool use_single_shapes() {
    for (const int s : shapes_) {
      int k = num_matrices(s);
      while (k > 0 && problem_.time(s)(k) > question_.limit) --k;
      if (k == 0) return false;
      Pattern pattern(static_cast<std::size_t>(problem_.num_shapes()), 0);
      pattern[static_cast<std::size_t>(s)] = k;
      use(pattern);
    }
    return true;
  }

  // Rounded down; at `scale` a pattern pays for its owner.
  Prices whole_prices(const std::vector<double>& prices, double scale) const {
    const auto num_shapes = static_cast<std::size_t>(problem_.num_shapes());
    Prices whole{std::vector<std::int64_t>(num_shapes, 0),
                 std::vector<std::int64_t>(num_shapes, 0)};
    for (std::size_t i = 0; i < prices.size(); ++i) {
      const bool of_work = i >= shapes_.size();
      const int s = shapes_[of_work ? i - shapes_.size() : i];
      const Nanoseconds all = of_work ? all_work(s) : num_matrices(s);
      if (all == 0) continue;
      const auto whole_most = kMaxTimeValue / (of_work ? question_.limit : 1);
      const auto most = static_cast<double>(whole_most);
      const double price = std::max(0.0, prices[i]) * scale / static_cast<double>(all);
      (of_work ? whole.per_ns : whole.per_matrix)[static_cast<std::size_t>(s)] =
          static_cast<std::int64_t>(std::min(price, most));
    }
    return whole;
  }

  // In whole numbers; see Certificate::Kind::kPatterns.
  bool proves(const Prices& prices, std::int64_t most) const {
    Wide all = 0;
    for (int s = 0; s < problem_.num_shapes(); ++s) {
      if (num_matrices(s) != problem_.num_matrices(s)) return false;
      const auto i = static_cast<std::size_t>(s);
      all += static_cast<Wide>(prices.per_matrix[i]) * num_matrices(s) +
             static_cast<Wide>(prices.per_ns[i]) * all_work(s);
    }
    return all > Wide{most} * problem_.num_owners();
  }

  const Problem& problem_;
  const PatternLp::Question& question_;
  std::vector<int> shapes_;
  std::vector<Pattern> used_;
  std::vector<std::vector<double>> shares_;  // [used patterns][kinds of work]
};

}  // namespace

PatternLp::Answer PatternLp::solve(const Question& question) {
  return Solver(*problem_, question).solve(patterns_, num_rounds_);
}

}  // namespace dmuon::balance
