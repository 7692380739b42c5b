#pragma once

#include <cstdint>
#include <string>

namespace dmuon::optim {

/// Rules by which a matrix's learning rate follows from its shape; names are torch.optim.Muon's.
enum class AdjustLr {
  kOriginal,           ///< lr * sqrt(max(1, rows / cols)) (Jordan)
  kMatchRmsAdamw,      ///< lr * 0.2 * sqrt(max(rows, cols)) (Moonlight)
  kSpectralUnclamped,  ///< lr * sqrt(rows / cols)
};

/// @throws InvalidArgument that lists the known names.
AdjustLr parse_adjust_lr(const std::string& name);

/// Returns the learning rate of a rows x cols matrix.
double adjust_lr(AdjustLr rule, double lr, std::int64_t rows, std::int64_t cols);

}  // namespace dmuon::optim
