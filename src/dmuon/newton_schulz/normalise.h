#pragma once

#include <ATen/core/Tensor.h>

namespace dmuon::newton_schulz {

/// Divides every matrix by its Frobenius norm, then rounds to `dtype`.
///
/// Safe for entries of any size the input's dtype can hold (1e-30 .. 1e30 and
/// beyond): on CPUs the norm is taken in fp64, elsewhere after division by the
/// largest entry. A zero matrix stays zero; a matrix with a NaN or an infinity
/// becomes all NaN. Each matrix's result is bitwise independent of the batch
/// (CPUs).
///
/// @param x      [b, rows, cols], fp64, fp32, bf16 or fp16.
/// @param dtype  of the result.
/// @return       [b, rows', cols'] contiguous, new. On CPUs rows' and cols' are
///               rounded up to 64 bytes and padded with zeros, which the
///               iteration keeps zero: BLAS results depend on the alignment of
///               the operands, and this makes it the same for every matrix.
at::Tensor normalise(const at::Tensor& x, at::ScalarType dtype);

}  // namespace dmuon::newton_schulz
