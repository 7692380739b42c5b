#include "dmuon/balance/simplex.h"

#include <gtest/gtest.h>

#include "dmuon/balance/random.h"

namespace dmuon::balance {
namespace {

constexpr int kNumPrograms = 300;
constexpr double kTolerance = 1e-6;

using Columns = std::vector<std::vector<double>>;

Simplex::Step run(Simplex* simplex) {
  Simplex::Step step = Simplex::Step::kMoved;
  while (step == Simplex::Step::kMoved) step = simplex->step();
  return step;
}

// Weak duality needs no trust in the search: a cover and prices of one value are both optimal.
void expect_optimal(const Simplex& simplex, const Columns& columns, std::size_t num_rows) {
  double primal = 0;
  std::vector<double> covered(num_rows, 0);
  for (std::size_t j = 0; j < columns.size(); ++j) {
    const double amount = simplex.x(static_cast<int>(j));
    ASSERT_GE(amount, 0);
    primal += amount;
    for (std::size_t i = 0; i < num_rows; ++i) covered[i] += amount * columns[j][i];
  }
  double dual = 0;
  for (std::size_t i = 0; i < num_rows; ++i) {
    ASSERT_GE(covered[i], 1 - kTolerance) << "row " << i;
    ASSERT_GE(simplex.duals()[i], -kTolerance);
    dual += simplex.duals()[i];
  }
  for (const std::vector<double>& column : columns) {
    double worth = 0;
    for (std::size_t i = 0; i < num_rows; ++i) worth += simplex.duals()[i] * column[i];
    ASSERT_LE(worth, 1 + kTolerance);
  }
  ASSERT_NEAR(primal, dual, kTolerance);
  ASSERT_NEAR(primal, simplex.value(), kTolerance);
}

std::vector<double> draw_column(Random& random, std::size_t num_rows) {
  std::vector<double> column(num_rows, 0);
  for (double& value : column) {
    if (random.below(3) > 0) value = random.below(21) / 10.0;
  }
  return column;
}

// A column for each row alone, which makes a basis, and others.
void solve_random(std::uint64_t seed) {
  SCOPED_TRACE(seed);
  Random random(seed);
  const auto num_rows = static_cast<std::size_t>(1 + random.below(8));
  Simplex simplex(static_cast<int>(num_rows));
  Columns columns;
  std::vector<int> basis;
  for (std::size_t i = 0; i < num_rows; ++i) {
    columns.emplace_back(num_rows, 0)[i] = 0.1 * (1 + random.below(9));
    basis.push_back(simplex.add(columns.back()));
  }
  ASSERT_TRUE(simplex.start(basis));
  // Columns come one by one, as from column generation.
  const int num_batches = 1 + random.below(3);
  for (int batch = 0; batch < num_batches; ++batch) {
    for (int left = random.below(20); left > 0; --left) {
      columns.push_back(draw_column(random, num_rows));
      ASSERT_EQ(simplex.add(columns.back()), static_cast<int>(columns.size()) - 1);
    }
    ASSERT_EQ(run(&simplex), Simplex::Step::kOptimal);
    expect_optimal(simplex, columns, num_rows);
  }
}

TEST(Simplex, IsOptimalByWeakDuality) {
  for (int seed = 0; seed < kNumPrograms; ++seed) solve_random(static_cast<std::uint64_t>(seed));
}

// Three sets of two elements each of three: half of each covers all.
TEST(Simplex, KnowsTheFractionalCoverOfATriangle) {
  Simplex simplex(3);
  Columns columns = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {1, 1, 0}, {0, 1, 1}, {1, 0, 1}};
  for (const std::vector<double>& column : columns) simplex.add(column);
  ASSERT_TRUE(simplex.start({0, 1, 2}));
  EXPECT_DOUBLE_EQ(simplex.value(), 3);
  ASSERT_EQ(run(&simplex), Simplex::Step::kOptimal);
  EXPECT_NEAR(simplex.value(), 1.5, kTolerance);
  for (int column = 3; column < 6; ++column) EXPECT_NEAR(simplex.x(column), 0.5, kTolerance);
  expect_optimal(simplex, columns, 3);
}

TEST(Simplex, StartsWithASurplus) {
  Simplex simplex(2);
  const Columns columns = {{0.5, 1}, {1, 0.25}};
  for (const std::vector<double>& column : columns) simplex.add(column);
  // Two of the first cover row 0, and row 1 twice.
  ASSERT_TRUE(simplex.start({0, Simplex::kSurplus}));
  EXPECT_DOUBLE_EQ(simplex.value(), 2);
  ASSERT_EQ(run(&simplex), Simplex::Step::kOptimal);
  expect_optimal(simplex, columns, 2);
}

TEST(Simplex, RefusesABasisThatCoversTooLittle) {
  Simplex simplex(2);
  simplex.add({1, 0.5});
  EXPECT_FALSE(simplex.start({0, Simplex::kSurplus}));
  EXPECT_FALSE(simplex.start({0, 0})) << "singular";
  EXPECT_TRUE(simplex.start({Simplex::kSurplus, 0}));
}

// Over more pivots than one factorization serves.
TEST(Simplex, StaysExactOverManyPivots) {
  constexpr std::size_t kNumRows = 40;
  Random random(5);
  Simplex simplex(kNumRows);
  Columns columns;
  std::vector<int> basis;
  for (std::size_t i = 0; i < kNumRows; ++i) {
    columns.emplace_back(kNumRows, 0)[i] = 0.25;
    basis.push_back(simplex.add(columns.back()));
  }
  ASSERT_TRUE(simplex.start(basis));
  for (int j = 0; j < 400; ++j) {
    columns.push_back(draw_column(random, kNumRows));
    simplex.add(columns.back());
  }
  int num_pivots = 0;
  while (simplex.step() == Simplex::Step::kMoved) ++num_pivots;
  EXPECT_GT(num_pivots, 80);
  expect_optimal(simplex, columns, kNumRows);
}

}  // namespace
}  // namespace dmuon::balance
