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
  EXPECT_EQ(orthogonalisation(10, 100, {3, 2}, Form::kSegmented, kTriangle), 6e4 + 14e3);
  EXPECT_EQ(orthogonalisation(10, 100, {3, 1, 1}, Form::kSegmented, kTriangle), 9e4 + 11e3);
}

TEST(Orthogonalisation, OfCubicStepsByThemselvesTakesNoSquareOfR) {
  EXPECT_EQ(products({1, 1, 1}, 3), (Products{3, 0, 3}));
  EXPECT_EQ(products({2, 1, 2}, 1), (Products{3, 10, 3}));
  EXPECT_EQ(orthogonalisation(10, 100, {1, 1, 1, 1, 1}, Form::kDirect, kFull, 5), 20e4);
  EXPECT_EQ(orthogonalisation(10, 100, {2, 1, 2}, Form::kSegmented, kFull, 1), 12e4 + 20e3);
}

TEST(Orthogonalisation, WeighsOnlyWhatTheGramFormDoesInItsOwnDtype) {
  const SymmetricCost twice{.share = 1, .gram_dtype = 2};
  EXPECT_EQ(orthogonalisation(10, 100, 5, Form::kDirect, twice), 20e4 + 10e3);
  EXPECT_EQ(orthogonalisation(10, 100, {3, 2}, Form::kSegmented, twice), 8e4 + 28e3);
  // Two of the five segments' products, Q X, are in the working dtype: 4 m^2 n.
  EXPECT_EQ(orthogonalisation(10, 100, 5, Form::kGram, twice), 4e4 + 2 * (4e4 + 28e3));
}

TEST(Orthogonalisation, DoesNotDependOnTheOrderOfSides) {
  for (const Form form : {Form::kDirect, Form::kGram}) {
    EXPECT_EQ(orthogonalisation(300, 700, 5, form, kTriangle),
              orthogonalisation(700, 300, 5, form, kTriangle));
  }
}

TEST(Segments, EndWhereTheFormMultipliesX) {
  EXPECT_EQ(segments(3, Form::kDirect), (Segments{1, 1, 1}));
  EXPECT_EQ(segments(1, Form::kGram), (Segments{1}));
  EXPECT_EQ(segments(2, Form::kGram), (Segments{2}));
  EXPECT_EQ(segments(7, Form::kGram), (Segments{2, 3, 2}));
  for (const Form form : {Form::kDirect, Form::kGram}) EXPECT_TRUE(segments(0, form).empty());
}

// The iteration itself, counted, as orthogonalize.h says it multiplies R, Z and Q.
TEST(Products, AreThoseThatTheStepsMake) {
  for (const Segments& lengths :
       {Segments{}, {1}, {2}, {5}, {2, 3}, {3, 2}, {2, 1, 2}, {1, 1, 1, 1}}) {
    Products counted;
    for (const int length : lengths) {
      for (int step = 0; step < length; ++step) {
        counted.to_square += step == 0;  // R
        const bool last = step + 1 == length;
        counted.square += 1;             // Z
        counted.square += step > 0;      // Z Q
        counted.square += last ? 0 : 2;  // R Z and the next R
        counted.to_wide += last;         // X
      }
    }
    EXPECT_EQ(products(lengths), counted);
  }
}

TEST(Orthogonalisation, CostsLeastInTheDirectFormForSquareMatricesAndElsewhereForWideOnes) {
  const auto gains = [](Form form, std::int64_t m, std::int64_t n, const SymmetricCost& symmetric) {
    return orthogonalisation(m, n, 5, form, symmetric) <
           orthogonalisation(m, n, 5, Form::kDirect, symmetric);
  };
  EXPECT_FALSE(gains(Form::kGram, 4096, 4096, kTriangle));
  EXPECT_TRUE(gains(Form::kGram, 4096, 4097, kTriangle));
  EXPECT_TRUE(gains(Form::kGram, 4097, 4096, kTriangle));
  EXPECT_FALSE(gains(Form::kGram, 4096, 6144, kFull));
  EXPECT_TRUE(gains(Form::kGram, 4096, 6145, kFull));
  const SymmetricCost bf16_cpu{.share = 0.5, .gram_dtype = 2.15};
  EXPECT_FALSE(gains(Form::kGram, 4096, 8192, bf16_cpu));
  EXPECT_TRUE(gains(Form::kGram, 4096, 40960, bf16_cpu));
}

}  // namespace
}  // namespace dmuon::flops
