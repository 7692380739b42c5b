#pragma once

#include <c10/core/ScalarType.h>

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

/// Returns the rows of a named set for `num_steps` steps. Steps past the set's table repeat its
/// last row.
///
///   polar_express  eight rows by minimax approximation (arXiv 2505.16932), with a safety factor of
///                  1.05.
///   quintic        one row for every step, as in torch.optim.Muon (Jordan).
///   you            five rows (YouJiacheng).
///   cans           five rows by Remez's algorithm (arXiv 2506.10935), with a safety
///                  factor of 1.02.
///   deepseekv4     eight steps of the quintic, two of (2, -1.5, 0.5) (DeepSeek-V4's report).
///   cubic5         five cubic rows, c = 0 (arXiv 2606.00371), with a safety factor of 1.01.
///
/// A safety factor damps all rows but the last. Without it these sets run away just above a
/// singular value of 1, where rounding to 16 bits gets.
///
/// The last two exist for ten and for five steps alone. dmuon has no set
/// "aol" of other libraries: it needs a scaling of its own, and after a division by the norm its
/// first row maps singular values above 0.88 to negative ones, so that updates would climb.
///
/// @param num_steps  in [0, 100), torch.optim.Muon's own limit.
/// @return           num_steps rows.
/// @throws InvalidArgument for an unknown name, listing the known ones, or a bad num_steps.
Coefficients resolve(std::string_view name, int num_steps);

/// Returns the same for the user's own rows.
///
/// @param rows  at least one if num_steps > 0; finite. Rows past num_steps
///              are dropped.
/// @throws InvalidArgument naming the first bad argument.
Coefficients resolve(const Coefficients& rows, int num_steps);

/// Returns the segments in which steps of these rows run with 16-bit products
/// (flops::Form::kSegmented) for an m x n matrix, either order of sides. Returns nothing if no
/// measurement covers the case, dtype included.
///
/// bf16, with WideSquares. Errors were measured for five rows of the named sets, short sides from
/// 128 to 4096, and long sides from 1.5 to 2.5 times the short one on. They are at most 1.3 times
/// the errors of torch.optim.Muon's arithmetic, mostly less. The matrices were
/// - Gaussian, also with a mean, or with rows or columns that fall off by 10 to 1e3;
/// - of condition number 10 to 1e7 in any direction;
/// - with up to three directions that have 0.3 to 0.9999 of the norm's square between them.
///   Gradients of layers whose inputs have a mean are like this.
///
/// The choice of steps that go together matters. Rows of the other sets nearly annihilate such a
/// direction, and in a third step its rounding errors grow without bound. So only the quintic has
/// segments of three. Columns that fall off are the hardest case, the more so the larger and the
/// nearer to a square the matrix is.
///
/// fp16, with R, Z and Q in fp16 and all their products symmetric. If the error of
/// torch.optim.Muon's arithmetic in fp16 exceeds 4 eps (3.9e-3), the matrix's condition decides.
/// For such matrices the table has the largest error over that one. For the other matrices it has,
/// after the slash, the largest error times 1000. "Gram" is {2, 3} with R Z and Z Q in full.
///
///     shape        {2, 1, 2}   {3, 2}      {2, 3}      Gram
///     128 x 128    1.02 / 3.4  3.00 / 20   4.52 / 34   2.57 / 16
///     128 x 192    1.03 / 3.2  2.67 / 19   3.17 / 29   2.12 / 14
///     128 x 512    1.01 / 2.7  2.17 / 27   2.65 / 6.7  1.74 / 5.7
///     256 x 256    1.02 / 3.2  1.94 / 14   5.47 / 35   3.04 / 17
///     256 x 384    1.01 / 3.0  1.85 / 13   4.28 / 32   2.48 / 14
///     256 x 1024   1.01 / 2.7  1.64 / 17   3.49 / 11   2.10 / 8.0
///     512 x 512    1.01 / 2.9                          3.06 / 17
///     512 x 768    1.01 / 2.9                          2.61 / 14
///     512 x 2048   1.01 / 1.9                          2.25 / 2.4
///     1024 x 1536  0.93 / 2.9
///     2048 x 3072  0.84 / 2.4
///     4096 x 6144       / 2.5
///
/// bench/segment_errors.py measured this on an AMD EPYC, with products in fp32 that are rounded
/// once. Up to 256 rows it had all matrices and three seeds; at 512 eleven kinds of matrices; at
/// 1024 five. At 2048 it had five kinds for Polar Express, at 4096 two for the quintic, one seed
/// each: Gaussian ones and columns that fall off were among them.
std::optional<flops::Segments> measured_segments(const Coefficients& rows, std::int64_t m,
                                                 std::int64_t n, at::ScalarType dtype);

}  // namespace dmuon::newton_schulz
