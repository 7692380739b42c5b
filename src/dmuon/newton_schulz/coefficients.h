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

/// How the steps of these rows may go in segments (flops::Form::kSegmented) wholly in bf16 for an
/// m x n matrix, either order of sides: known for five rows of the named sets and sides from 256
/// on. There errors were measured, and are at most 1.3 times those of torch.optim.Muon's
/// arithmetic: long sides 4/3 to 8 times the short ones; Gaussian, also with rows or columns that
/// fall off by 10 to 1e3, and of condition number 10 to 1e7 in any direction. It matters which
/// steps go together, and columns that fall off on nearly square matrices are the hardest: there
/// {2, 1, 2} and {3, 2} have twice those errors, as two pairs of polar_express have up to 1.6 times
/// for other matrices.
std::optional<flops::Segments> measured_segments(const Coefficients& rows, std::int64_t m,
                                                 std::int64_t n);

}  // namespace dmuon::newton_schulz
