#pragma once

#include <ATen/core/Tensor.h>

namespace dmuon::newton_schulz {

// Matrix products of the iteration. Operands are [m, k] or, batched, [b, m, k]; all of one dtype
// and device, the caller's responsibility. No autograd. Results land in `out`, which may be a
// slice.
//
// On CPUs the products of 16-bit dtypes that the hardware does not multiply run in fp32 and round
// once, which is what tensor cores do, and is 10 to 20 times faster than torch's own emulation.

/// out <- beta c + alpha a b. `out` must not overlap a or b; it may be c.
/// With beta = 0, c is not read.
void product(const at::Tensor& out, double beta, const at::Tensor& c, double alpha,
             const at::Tensor& a, const at::Tensor& b);

/// The same for a product a b that is symmetric in exact arithmetic, and a
/// symmetric c: only panels on and below the diagonal are computed, and
/// mirrored, so `out` is bitwise symmetric.
///
/// @param out  [(b,) m, m] contiguous.
void symmetric_product(const at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                       const at::Tensor& a, const at::Tensor& b);

/// Copies the strictly lower triangle of each matrix onto its upper one.
///
/// @param square  [(b,) m, m] contiguous.
void mirror_lower(const at::Tensor& square);

}  // namespace dmuon::newton_schulz
