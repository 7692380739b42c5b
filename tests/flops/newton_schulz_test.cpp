#include "dmuon/flops/newton_schulz.h"

#include <gtest/gtest.h>

#include <tuple>

namespace dmuon::flops {
namespace {

constexpr SymmetricCost kFull{};
constexpr SymmetricCost kTriangle{.share = 0.5};

TEST(Orthogonalisation, WithFullProductsTakesTheFlopsOfTheFormulas) {
  EXPECT_EQ(orthogonalisation(10, 100, 5, Form::kDirect, kFull), 20e4 + 10e3);
  EXPECT_EQ(orthogonalisation(10, 100, 5, Form::kGram, kFull), 8e4 + 28e3);
}

TEST(Orthogonalisation, WithTrianglesTakesTheFlopsOfTheFormulas) {
  EXPECT_EQ(orthogonalisation(10, 100, 5, Form::kDirect, kTriangle), 15e4 + 5e3);
  EXPECT_EQ(orthogonalisation(10, 100, 5, Form::kGram, kTriangle), 6e4 + 14e3);
}

TEST(Orthogonalisation, WeighsOnlyWhatTheGramFormDoesInItsOwnDtype) {
  const SymmetricCost twice{.share = 1, .gram_dtype = 2};
  EXPECT_EQ(orthogonalisation(10, 100, 5, Form::kDirect, twice), 20e4 + 10e3);
  // Two of the five segments' products, Q X, are in the working dtype: 4 m^2 n.
  EXPECT_EQ(orthogonalisation(10, 100, 5, Form::kGram, twice), 4e4 + 2 * (4e4 + 28e3));
}

TEST(Orthogonalisation, DoesNotDependOnTheOrderOfSides) {
  for (const Form form : {Form::kDirect, Form::kGram}) {
    EXPECT_EQ(orthogonalisation(300, 700, 5, form, kTriangle),
              orthogonalisation(700, 300, 5, form, kTriangle));
  }
}

// The iteration itself, counted: the Gram form multiplies R, Z and Q as orthogonalize.h says.
TEST(Products, AreThoseThatTheStepsMake) {
  for (int steps = 0; steps < 9; ++steps) {
    Products gram;
    for (int step = 0; step < steps; ++step) {
      const bool first = step == 0 || step == kRestartStep;
      const bool last = step + 1 == steps || step + 1 == kRestartStep;
      gram.to_square += first;      // R
      gram.square += 1;             // Z
      gram.square += !first;        // Q
      gram.square += last ? 0 : 2;  // the next R
      gram.to_wide += last;         // X
    }
    const auto [to_square, square, to_wide] = products(steps, Form::kGram);
    EXPECT_EQ(std::tie(to_square, square, to_wide),
              std::tie(gram.to_square, gram.square, gram.to_wide))
        << steps;
    const Products direct = products(steps, Form::kDirect);
    EXPECT_EQ(direct.to_square, steps);
    EXPECT_EQ(direct.square, steps);
    EXPECT_EQ(direct.to_wide, steps);
  }
}

TEST(CheaperForm, IsDirectForSquareMatricesAndGramForWideOnes) {
  EXPECT_EQ(cheaper_form(4096, 4096, 5, kTriangle), Form::kDirect);
  EXPECT_EQ(cheaper_form(4096, 4097, 5, kTriangle), Form::kGram);
  EXPECT_EQ(cheaper_form(4097, 4096, 5, kTriangle), Form::kGram);
  EXPECT_EQ(cheaper_form(4096, 6144, 5, kFull), Form::kDirect);
  EXPECT_EQ(cheaper_form(4096, 6145, 5, kFull), Form::kGram);
  const SymmetricCost bf16_cpu{.share = 0.5, .gram_dtype = 2.15};
  EXPECT_EQ(cheaper_form(4096, 8192, 5, bf16_cpu), Form::kDirect);
  EXPECT_EQ(cheaper_form(4096, 40960, 5, bf16_cpu), Form::kGram);
}

}  // namespace
}  // namespace dmuon::flops
