#include "dmuon/optim/adjust_lr.h"

#include <algorithm>
#include <cmath>

#include "dmuon/core/error.h"

namespace dmuon::optim {

AdjustLr parse_adjust_lr(const std::string& name) {
  if (name == "original") return AdjustLr::kOriginal;
  if (name == "match_rms_adamw") return AdjustLr::kMatchRmsAdamw;
  core::require(
      name == "spectral_unclamped",
      "Muon: adjust_lr_fn: expected 'original', 'match_rms_adamw', 'spectral_unclamped' or None, "
      "got '",
      name, "'");
  return AdjustLr::kSpectralUnclamped;
}

double adjust_lr(AdjustLr rule, double lr, std::int64_t rows, std::int64_t cols) {
  const double ratio = static_cast<double>(rows) / static_cast<double>(cols);
  switch (rule) {
    case AdjustLr::kOriginal:
      return lr * std::sqrt(std::max(1.0, ratio));
    case AdjustLr::kMatchRmsAdamw:
      return lr * 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols)));
    case AdjustLr::kSpectralUnclamped:
      return lr * std::sqrt(ratio);
  }
  core::bug("adjust_lr: unknown rule");
}

}  // namespace dmuon::optim
