#pragma once

#include "dmuon/newton_schulz/method.h"

namespace dmuon::newton_schulz {

/// Newton-Schulz: moves the singular values of every matrix of `x` towards 1 and keeps its singular
/// vectors. It starts from X = x / ||x||_F and takes one step for each row (a, b, c):
/// X <- a X + (b R + c R^2) X, with R = X X' on the short side.
///
/// - Direct form: as written.
/// - Gram form (Gram Newton-Schulz, Dao-AILab 2026): starts from R = X X' and Q = I. Each step is
///   Z = b R + c R^2, Q <- Z Q + a Q, R <- (Z + a I) R (Z + a I). Each segment (flops::segments)
///   ends with X <- Q X; the next one starts from a new R and Q.
/// - Segmented form: the Gram form in other segments, with products in `dtype`. In bf16 R, Z and Q
///   are in fp32 (WideSquare in products.h), so it avoids the cost of fp32 products. In fp16 they
///   are in fp16, and all their products are symmetric.
///
/// A norm below eps counts as eps, as in torch.optim.Muon, so that a negligible gradient makes no
/// full-sized update. With eps = 0 results do not depend on the scale of x (entries 1e-30 .. 1e30
/// and beyond). A zero matrix gives zero. A NaN or infinity makes its whole matrix NaN.
///
/// Deterministic. On CPUs a matrix has the same bits alone and in a batch. Runs on x's device, on
/// the current stream. Thread-safe. Records no autograd and does not change `x`.
///
/// @param x  [..., m, n] fp64, fp32, bf16 or fp16, any strides; any dimension may be 0. If the
///           caller moves its last reference here, x is freed before the iteration begins.
/// @return   x's shape, contiguous, in options.dtype.
/// @throws InvalidArgument naming the first bad argument.
at::Tensor orthogonalize(at::Tensor x, const IterationOptions& options);

}  // namespace dmuon::newton_schulz
