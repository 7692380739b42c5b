#pragma once

#include <cstdint>
#include <string>

namespace dmuon::optim {

/// How the learning rate of a matrix follows from its shape, with torch.optim.Muon's names.
enum class AdjustLr {
  kOriginal,           ///< lr * sqrt(max(1, rows / cols)) (Jordan)
  kMatchRmsAdamw,      ///< lr * 0.2 * sqrt(max(rows, cols)) (Moonlight)
  kSpectralUnclamped,  ///< lr * sqrt(rows / cols)
};

/// @throws InvalidArgument that lists the known names.
AdjustLr parse_adjust_lr(const std::string& name);

double adjust_lr(AdjustLr rule, double lr, std::int64_t rows, std::int64_t cols);

}  // namespace dmuon::optim
