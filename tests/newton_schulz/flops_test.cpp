#include "dmuon/newton_schulz/flops.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace dmuon::newton_schulz {
namespace {

TEST(Flops, TendToTheFormulasOfIdealTriangles) {
  const double m = 1 << 20;
  const std::int64_t side = 1 << 20;
  const double direct = flops(side, 2 * side, 5, Form::kDirect).total() / (m * m * m);
  const double gram = flops(side, 2 * side, 5, Form::kGram).total() / (m * m * m);
  EXPECT_NEAR(direct, 15 * 2 + 5, 0.01);
  EXPECT_NEAR(gram, 6 * 2 + 14, 0.01);
}

// Below kMinPanelledRows every product is full: 20 m^2 n + 10 m^3 and 8 m^2 n + 28 m^3.
TEST(Flops, AreThoseOfFullProductsForSmallMatrices) {
  EXPECT_EQ(flops(10, 100, 5, Form::kDirect).total(), 20e4 + 10e3);
  EXPECT_EQ(flops(10, 100, 5, Form::kGram).total(), 8e4 + 28e3);
}

// Counted panel by panel, as product.cpp runs them.
TEST(Flops, CountThePanelsOfASymmetricProduct) {
  for (const std::int64_t m : {255, 256, 384, 1024, 1152}) {
    const std::int64_t panels = num_panels(m);
    double counted = 0;
    for (std::int64_t i = 0; i < panels; ++i) {
      const auto start = m * i / panels;
      const auto end = m * (i + 1) / panels;
      counted += 2.0 * static_cast<double>((end - start) * end * 7);
    }
    EXPECT_NEAR(symmetric_product_flops(m, 7) / counted, 1, 1e-12) << m;
  }
}

TEST(Flops, DoNotDependOnTheOrderOfSides) {
  for (const Form form : {Form::kDirect, Form::kGram}) {
    EXPECT_EQ(flops(300, 700, 5, form).total(), flops(700, 300, 5, form).total());
  }
}

TEST(Flops, OneSegmentUpToTheRestartAndTwoPastIt) {
  // m = n = 1: a segment of L steps takes 2 + 2 + 2 (4 L - 3).
  EXPECT_EQ(flops(1, 1, 0, Form::kGram).total(), 0);
  EXPECT_EQ(flops(1, 1, 1, Form::kGram).total(), 6);
  EXPECT_EQ(flops(1, 1, 2, Form::kGram).total(), 14);
  EXPECT_EQ(flops(1, 1, 3, Form::kGram).total(), 20);
}

TEST(Flops, SquareGoesDirectAndWideGoesGram) {
  EXPECT_EQ(cheaper_form(4096, 4096, 5), Form::kDirect);
  EXPECT_EQ(cheaper_form(4096, 8192, 5), Form::kGram);
  EXPECT_EQ(cheaper_form(8192, 4096, 5), Form::kGram);
  EXPECT_EQ(cheaper_form(4096, 8192, 5, 2.15), Form::kDirect);
  EXPECT_EQ(cheaper_form(4096, 40960, 5, 2.15), Form::kGram);
}

}  // namespace
}  // namespace dmuon::newton_schulz
