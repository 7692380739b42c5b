#pragma once

#include <cstdint>
#include <utility>

namespace dmuon::newton_schulz {

// What one orthogonalisation costs, as this module performs it. Free of torch, so that a planner
// can use the same figures. Shapes: m x n with m = short side, n = long side.

/// The two algebraically equal forms of the iteration (orthogonalize.h).
enum class Form { kDirect, kGram };

/// The step index before which the Gram form applies Q to X and starts afresh.
inline constexpr int kRestartStep = 2;

/// Rows of a panel of a symmetric m x m product. A product of m rows takes
/// ceil(m / kPanelRows) panels of near-equal height, or one when m is below
/// kMinPanelledRows.
inline constexpr std::int64_t kPanelRows = 128;
inline constexpr std::int64_t kMinPanelledRows = 256;

/// Panels of a symmetric product of m rows.
constexpr std::int64_t num_panels(std::int64_t m) {
  return m < kMinPanelledRows ? 1 : (m + kPanelRows - 1) / kPanelRows;
}

/// FLOPs of one orthogonalisation, by the precision they run in.
struct Flops {
  double working = 0;  ///< in the working dtype
  double gram = 0;     ///< Gram form only: R, Z and Q, in the Gram dtype
  constexpr double total() const { return working + gram; }
};

/// FLOPs (two a multiply-add) of a symmetric m x m product with inner
/// dimension k: panel i of height h computes columns 0 .. (i + 1) h only, so p
/// panels do (1 + 1/p) / 2 of the full product.
constexpr double symmetric_product_flops(std::int64_t m, std::int64_t k) {
  const auto p = static_cast<double>(num_panels(m));
  const auto rows = static_cast<double>(m);
  return rows * rows * static_cast<double>(k) * (1 + 1 / p);
}

/// FLOPs of `steps` steps on one m x n matrix (either order of sides).
///
/// With S(k) = symmetric_product_flops(m, k):
///   direct  steps (S(n) + S(m) + 2 m^2 n)
///   gram    a segment of L steps: S(n) + 2 m^2 n + (4 L - 3) S(m); two
///           segments when steps > kRestartStep, else one.
/// As m grows, S(k) -> m^2 k and five steps cost 15 m^2 n + 5 m^3 (direct) and
/// 6 m^2 n + 14 m^3 (gram).
constexpr Flops flops(std::int64_t m, std::int64_t n, int steps, Form form) {
  if (m > n) std::swap(m, n);
  if (steps <= 0) return {};
  const double apply =
      2.0 * static_cast<double>(m) * static_cast<double>(m) * static_cast<double>(n);
  const double gram_matrix = symmetric_product_flops(m, n);
  const double square = symmetric_product_flops(m, m);
  if (form == Form::kDirect) return {steps * (gram_matrix + square + apply), 0};
  const int segments = steps > kRestartStep ? 2 : 1;
  return {segments * apply, segments * gram_matrix + (4 * steps - 3 * segments) * square};
}

/// The form with less to do; a tie goes to the direct form.
///
/// @param gram_cost  time of a FLOP in the Gram dtype over one in the working
///                   dtype; 1 where they are the same.
constexpr Form cheaper_form(std::int64_t m, std::int64_t n, int steps, double gram_cost = 1) {
  const Flops gram = flops(m, n, steps, Form::kGram);
  return gram.working + gram_cost * gram.gram < flops(m, n, steps, Form::kDirect).total()
             ? Form::kGram
             : Form::kDirect;
}

}  // namespace dmuon::newton_schulz
