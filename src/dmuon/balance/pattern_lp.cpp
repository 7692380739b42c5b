#include "dmuon/balance/pattern_lp.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "dmuon/balance/simplex.h"

namespace dmuon::balance {
namespace {

constexpr int kPatternCells = 4096;
constexpr int kMaxPatternRounds = 200;
// All work together is worth about this in whole prices; any pattern, far less than 2^63.
constexpr double kWholeValue = 288230376151711744.0;  // 2^58
// A shape's price of time is cut where a whole limit of it would be worth more. Any prices are
// honest, so a cut costs quality only.
constexpr std::int64_t kMaxTimeValue = std::int64_t{1} << 60;
constexpr double kConverged = 1e-6;  // of a pattern's reduced cost

}  // namespace

// One question. Rows: for each shape with work left, that all its matrices are done, and that their
// time is spent; both scaled to a right-hand side of 1.
class PatternLp::Solver {
 public:
  Solver(const Problem& problem, std::vector<Pattern>& patterns, const Question& question)
      : problem_(problem), patterns_(patterns), question_(question), simplex_(0) {
    for (int s = 0; s < problem.num_shapes(); ++s) {
      if (num_matrices(s) > 0) shapes_.push_back(s);
    }
    simplex_ = Simplex(static_cast<int>(shapes_.size()) * (question.work_rows ? 2 : 1));
  }

  Answer solve(int& num_rounds) {
    Answer answer;
    for (std::size_t p = 0; p < patterns_.size(); ++p) {
      if (load(problem_, patterns_[p]) <= question_.limit) use(p);
    }
    answer.impossible = !start();
    if (answer.impossible) return answer;
    for (int round = 0; round < kMaxPatternRounds; ++num_rounds, ++round) {
      if (reached_optimum() != Simplex::Step::kOptimal) break;
      const Prices prices = whole_prices();
      const PricedPattern found =
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
      if (static_cast<double>(found.value) <= scale_ * (1 + kConverged)) break;
      patterns_.push_back(found.pattern);
      use(patterns_.size() - 1);
    }
    for (std::size_t column = 0; column < used_.size(); ++column) {
      const double amount = simplex_.x(static_cast<int>(column));
      if (amount > 0) answer.uses.push_back({&patterns_[used_[column]], amount});
    }
    return answer;
  }

 private:
  int num_matrices(int shape) const {
    return question_.num_matrices[static_cast<std::size_t>(shape)];
  }

  Nanoseconds all_work(int shape) const { return problem_.time(shape)(num_matrices(shape)); }

  int cells() const { return static_cast<int>(std::min<Nanoseconds>(kPatternCells, question_.limit)); }

  // A shape that takes no time needs no work row; its row stays satisfied by its matrices.
  double share_of_work(int shape, int k) const {
    const Nanoseconds whole = all_work(shape);
    if (whole == 0) return static_cast<double>(k) / num_matrices(shape);
    return static_cast<double>(problem_.time(shape)(k)) / static_cast<double>(whole);
  }

  void use(std::size_t pattern) {
    std::vector<double> column;
    for (const int s : shapes_) {
      const int k = patterns_[pattern][static_cast<std::size_t>(s)];
      column.push_back(static_cast<double>(k) / num_matrices(s));
    }
    for (const int s : shapes_) {
      if (!question_.work_rows) break;
      column.push_back(share_of_work(s, patterns_[pattern][static_cast<std::size_t>(s)]));
    }
    used_.push_back(pattern);
    simplex_.add(std::move(column));
  }

  // For each shape a pattern of as much of it as fits. Its scarcer row holds with equality, the
  // other has a surplus.
  bool start() {
    const std::size_t n = shapes_.size();
    std::vector<int> basis(question_.work_rows ? 2 * n : n, Simplex::kSurplus);
    for (std::size_t i = 0; i < n; ++i) {
      const int s = shapes_[i];
      int k = num_matrices(s);
      while (k > 0 && problem_.time(s)(k) > question_.limit) --k;
      if (k == 0) return false;
      Pattern pattern(static_cast<std::size_t>(problem_.num_shapes()), 0);
      pattern[static_cast<std::size_t>(s)] = k;
      patterns_.push_back(pattern);
      use(patterns_.size() - 1);
      const double matrices = static_cast<double>(k) / num_matrices(s);
      const bool work_is_scarcer = question_.work_rows && share_of_work(s, k) < matrices;
      basis[work_is_scarcer ? n + i : i] = static_cast<int>(used_.size()) - 1;
    }
    return simplex_.start(basis);
  }

  // kMoved if fewer owners than asked for suffice already.
  Simplex::Step reached_optimum() {
    while (simplex_.value() > question_.num_owners + 1e-9) {
      const Simplex::Step step = simplex_.step();
      if (step != Simplex::Step::kMoved) return step;
    }
    return Simplex::Step::kMoved;
  }

  // The duals, rounded down to whole prices; at `scale_` a pattern pays for its owner.
  Prices whole_prices() {
    const auto num_shapes = static_cast<std::size_t>(problem_.num_shapes());
    Prices prices{std::vector<std::int64_t>(num_shapes, 0),
                  std::vector<std::int64_t>(num_shapes, 0)};
    scale_ = kWholeValue / std::max(1.0, simplex_.value());
    const std::vector<double>& duals = simplex_.duals();
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      const int s = shapes_[i];
      const double matrices = std::max(0.0, duals[i]) * scale_ / num_matrices(s);
      prices.per_matrix[static_cast<std::size_t>(s)] = static_cast<std::int64_t>(matrices);
      if (!question_.work_rows || all_work(s) == 0) continue;
      const double work =
          std::max(0.0, duals[shapes_.size() + i]) * scale_ / static_cast<double>(all_work(s));
      const std::int64_t most = kMaxTimeValue / question_.limit;
      prices.per_ns[static_cast<std::size_t>(s)] =
          work < static_cast<double>(most) ? static_cast<std::int64_t>(work) : most;
    }
    return prices;
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
  std::vector<Pattern>& patterns_;
  const Question& question_;
  std::vector<int> shapes_;
  Simplex simplex_;
  std::vector<std::size_t> used_;  // [columns of the simplex] index of a pattern
  double scale_ = 1;
};

void PatternLp::know(const Pattern& pattern) {
  if (std::find(patterns_.begin(), patterns_.end(), pattern) == patterns_.end()) {
    patterns_.push_back(pattern);
  }
}

PatternLp::Answer PatternLp::solve(const Question& question) {
  return Solver(*problem_, patterns_, question).solve(num_rounds_);
}

}  // namespace dmuon::balance
