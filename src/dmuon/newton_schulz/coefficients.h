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

/// How the steps of these rows may go in segments with bf16 products (flops::Form::kSegmented) for
/// an m x n matrix, either order of sides: known for five rows of the named sets, short sides from
/// 128 to 4096, and long ones from 1.5 to 2.5 times that on. There errors were measured, and are at
/// most 1.3 times those of torch.optim.Muon's arithmetic, mostly less: Gaussian matrices, also
/// with a mean, or with rows or columns that fall off by 10 to 1e3; of condition number 10 to 1e7
/// in any direction; and with up to three directions that have 0.3 to 0.9999 of the norm's square
/// between them, as gradients of layers whose inputs have a mean do.
///
/// It matters which steps go together. Where a row nearly annihilates such a direction, as those of
/// the other sets do, what rounding leaves of it grows in a third step without end, so only the
/// quintic has segments of three; and columns that fall off are the hardest, the more so the nearer
/// the matrix is to a square and the larger it is.
std::optional<flops::Segments> measured_segments(const Coefficients& rows, std::int64_t m,
                                                 std::int64_t n);

}  // namespace dmuon::newton_schulz
