#include "dmuon/optim/adjust_lr.h"

#include <gtest/gtest.h>

#include "dmuon/core/error.h"

namespace dmuon::optim {
namespace {

TEST(AdjustLr, OriginalScalesTallMatricesAlone) {
  EXPECT_DOUBLE_EQ(adjust_lr(AdjustLr::kOriginal, 0.5, 400, 100), 1.0);
  EXPECT_DOUBLE_EQ(adjust_lr(AdjustLr::kOriginal, 0.5, 100, 400), 0.5);
  EXPECT_DOUBLE_EQ(adjust_lr(AdjustLr::kOriginal, 0.5, 7, 7), 0.5);
}

TEST(AdjustLr, MatchRmsAdamwFollowsTheLongerSide) {
  EXPECT_DOUBLE_EQ(adjust_lr(AdjustLr::kMatchRmsAdamw, 0.5, 400, 100), 2.0);
  EXPECT_DOUBLE_EQ(adjust_lr(AdjustLr::kMatchRmsAdamw, 0.5, 100, 400), 2.0);
}

TEST(AdjustLr, SpectralUnclampedShrinksWideMatricesToo) {
  EXPECT_DOUBLE_EQ(adjust_lr(AdjustLr::kSpectralUnclamped, 0.5, 400, 100), 1.0);
  EXPECT_DOUBLE_EQ(adjust_lr(AdjustLr::kSpectralUnclamped, 0.5, 100, 400), 0.25);
}

TEST(ParseAdjustLr, KnowsTorchsNames) {
  EXPECT_EQ(parse_adjust_lr("original"), AdjustLr::kOriginal);
  EXPECT_EQ(parse_adjust_lr("match_rms_adamw"), AdjustLr::kMatchRmsAdamw);
  EXPECT_EQ(parse_adjust_lr("spectral_unclamped"), AdjustLr::kSpectralUnclamped);
}

TEST(ParseAdjustLr, ListsTheKnownNamesForAnother) {
  try {
    parse_adjust_lr("Original");
    FAIL() << "accepted";
  } catch (const core::InvalidArgument& error) {
    const std::string message = error.what();
    for (const char* part :
         {"adjust_lr_fn", "original", "match_rms_adamw", "spectral_unclamped", "got 'Original'"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace dmuon::optim
