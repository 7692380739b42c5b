#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "dmuon/flops/newton_schulz.h"

namespace dmuon::newton_schulz {

/// One step of the iteration: X <- a X + (b X X' + c (X X')^2) X, which maps
/// every singular value s to a s + b s^3 + c s^5.
struct Row {
  double a;
  double b;
  double c;

  bool operator==(const Row&) const = default;
};

/// One row a step.
using Coefficients = std::vector<Row>;

/// The rows of a named set for `num_steps` steps; steps past the set's table
/// repeat its last row.
///
///   polar_express  eight rows by minimax approximation, damped by a safety
///                  factor 1.05 on all but the last (arXiv 2505.16932).
///   quintic        one row for every step, as in torch.optim.Muon (Jordan).
///   you            five rows (YouJiacheng).
///
/// @param num_steps  in [0, 100), torch.optim.Muon's own limit.
/// @return           num_steps rows.
/// @throws InvalidArgument for an unknown name, listing the known ones, or a
///         bad num_steps.
Coefficients resolve(std::string_view name, int num_steps);

/// The same for rows of the user's own.
///
/// @param rows  at least one if num_steps > 0; finite. Rows past num_steps
///              are dropped.
/// @throws InvalidArgument naming the first bad argument.
Coefficients resolve(const Coefficients& rows, int num_steps);

/// How the steps of these rows may go in pairs (flops::Form::kPairs) wholly in bf16, where short
/// sides are at least kLeastPairedSide: errors were measured for five rows of the named sets, and
/// are at most 1.25 times those of torch.optim.Muon's arithmetic (short sides 256 to 512, long ones
/// 4/3 to 8 times as long; Gaussian, or of condition number 10 to 1e3). It matters which steps stay
/// alone: two pairs of polar_express have up to 1.6 times the error. Of other rows nothing is
/// known: none.
std::optional<flops::Segments> pairs(const Coefficients& rows);

/// Of 64 or 128 rows errors are up to 1.5 times as large.
inline constexpr std::int64_t kLeastPairedSide = 256;

}  // namespace dmuon::newton_schulz
