#include "dmuon/balance/pattern_lp.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "dmuon/balance/cover.h"

namespace dmuon::balance {
namespace {

constexpr int kProofCells = 4096;
constexpr int kDiveCells = 1536;  // proves nothing, takes about a third of the time
constexpr int kMaxColumnRounds = 200;
// All work together is worth about this in whole prices. Any pattern is worth far less than 2^63.
constexpr double kWholeValue = 288230376151711744.0;  // 2^58
// Cuts a shape's price of time if a whole limit of the shape would be worth more. Any prices give a
// true bound, so a cut costs quality only.
constexpr std::int64_t kMaxTimeValue = std::int64_t{1} << 60;
constexpr double kConverged = 1e-6;  // of a pattern's reduced cost

// Answers one question. Each shape with matrices left has two kinds of work: its matrices, and the
// time that they take together. A pattern does a share of each.
class Solver {
 public:
  Solver(const Problem& problem, const PatternLp::Question& question)
      : problem_(problem), question_(question) {
    for (const bool of_time : {false, true}) {
      for (const ShapeIndex s : problem.shapes()) {
        if (num_matrices(s) == 0 || (of_time && !question.work_rows)) continue;
        works_.push_back({s, of_time, of_time ? time_of_all(s) : num_matrices(s)});
      }
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
  struct Work {
    ShapeIndex shape;
    bool of_time;
    std::int64_t all;  // nanoseconds, or matrices
  };

  int num_matrices(ShapeIndex shape) const { return question_.num_matrices[shape]; }
  Nanoseconds time_of_all(ShapeIndex shape) const {
    return problem_.time(shape)(num_matrices(shape));
  }

  int cells() const {
    const int most = question_.num_owners > 0 ? kProofCells : kDiveCells;
    return static_cast<int>(std::min<Nanoseconds>(most, question_.limit));
  }

  void use(const Pattern& pattern) {
    std::vector<double>& shares = shares_.emplace_back();
    for (const Work& work : works_) {
      const int k = pattern[work.shape];
      // For a shape that takes no time, the matrices are the work of both kinds.
      const bool of_time = work.of_time && work.all > 0;
      const std::int64_t done = of_time ? problem_.time(work.shape)(k) : k;
      const std::int64_t all = of_time ? work.all : num_matrices(work.shape);
      shares.push_back(static_cast<double>(done) / static_cast<double>(all));
    }
    used_.push_back(pattern);
  }

  // Adds for each shape a pattern of as much of it as fits; otherwise there might be no cover.
  bool use_single_shapes() {
    for (const ShapeIndex s : problem_.shapes()) {
      int k = num_matrices(s);
      if (k == 0) continue;
      while (k > 0 && problem_.time(s)(k) > question_.limit) --k;
      if (k == 0) return false;
      Pattern pattern(question_.num_matrices.size());
      pattern[s] = k;
      use(pattern);
    }
    return true;
  }

  // Rounded down; at `scale` a pattern pays for its owner.
  Prices whole_prices(const std::vector<double>& prices, double scale) const {
    const PerShape<std::int64_t> none(question_.num_matrices.size());
    Prices whole{none, none};
    for (std::size_t i = 0; i < works_.size(); ++i) {
      const Work& work = works_[i];
      if (work.all == 0) continue;
      const std::int64_t most = kMaxTimeValue / (work.of_time ? question_.limit : 1);
      const double price = std::max(0.0, prices[i]) * scale / static_cast<double>(work.all);
      (work.of_time ? whole.per_ns : whole.per_matrix)[work.shape] =
          static_cast<std::int64_t>(std::min(price, static_cast<double>(most)));
    }
    return whole;
  }

  // In whole numbers; see Certificate::Kind::kPatterns.
  bool proves(const Prices& prices, std::int64_t most) const {
    if (question_.num_matrices != problem_.num_matrices()) return false;
    Wide all = 0;
    for (const ShapeIndex s : problem_.shapes()) {
      all += Wide{prices.per_matrix[s]} * num_matrices(s) + Wide{prices.per_ns[s]} * time_of_all(s);
    }
    return all > Wide{most} * problem_.num_owners();
  }

  const Problem& problem_;
  const PatternLp::Question& question_;
  std::vector<Work> works_;
  std::vector<Pattern> used_;
  std::vector<std::vector<double>> shares_;  // [used patterns][works]
};

}  // namespace

PatternLp::Answer PatternLp::solve(const Question& question) {
  return Solver(*problem_, question).solve(patterns_, num_rounds_);
}

}  // namespace dmuon::balance
