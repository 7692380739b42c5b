#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/flops/newton_schulz.h"
#include "dmuon/newton_schulz/backend.h"
#include "dmuon/newton_schulz/coefficients.h"

namespace dmuon::newton_schulz {

using flops::Form;

/// What is open in how a matrix is orthogonalised. It depends on the matrix's shape, its
/// coefficients and its dtype, never on the batch: a matrix takes the same path alone and in a
/// batch.
struct Choice {
  std::string backend;  ///< Backend::name
  Form form = Form::kDirect;
  bool batched = false;         ///< all matrices of a call at once, rather than one by one
  std::int64_t panel_rows = 0;  ///< of symmetric products; see Backend::panel_rows

  bool operator==(const Choice&) const = default;
};

/// By rows and columns of a matrix.
using Choices = std::map<std::pair<std::int64_t, std::int64_t>, Choice>;

struct IterationOptions {
  Coefficients coefficients;  ///< one row a step; none: the normalised input comes back
  double eps = 1e-7;          ///< in [0, 1]; see orthogonalize
  at::ScalarType dtype = at::ScalarType::Float;  ///< fp64, fp32, bf16 or fp16
  std::optional<Choice> choice;                  ///< unset: as choose says
  std::optional<Form> form;                      ///< instead of the choice's
  /// dtype of kGram's R, Z and Q: fp32 or wider than dtype, or dtype
  /// itself. Unset: the device's backend chooses (backend.h).
  std::optional<at::ScalarType> gram_dtype;
};

/// All that may be chosen for an m x n matrix: of each backend the direct form, the Gram form and,
/// where the backend has WideSquares in this dtype and `measured_segments` knows the rows and the
/// shape, the segmented form; each one by one and, where the backend makes batches of such
/// matrices, in one. And what takes the fewest FLOPs of these in the backend's other panels.
std::vector<Choice> candidates(std::int64_t m, std::int64_t n, const Coefficients& coefficients,
                               c10::Device device, at::ScalarType dtype);

/// Which of them `orthogonalize` takes when none is given: the default backend's form of fewest
/// FLOPs, in a batch where it makes one, in its default panels.
Choice choose(std::int64_t m, std::int64_t n, const Coefficients& coefficients, c10::Device device,
              at::ScalarType dtype);

/// Newton-Schulz: moves the singular values of every matrix of `x` towards 1
/// and keeps its singular vectors. X = x / ||x||_F; then one step for each row
/// (a, b, c): X <- a X + (b R + c R^2) X, R = X X' on the short side.
///
/// Direct form: as written. Gram form (Gram Newton-Schulz, Dao-AILab 2026): with
/// R = X X' and Q = I, each step takes Z = b R + c R^2, Q <- Z Q + a Q,
/// R <- (Z + a I) R (Z + a I); X <- Q X at the end of each segment (flops::segments), after which R
/// and Q start afresh. Segmented: the Gram form in other segments, with its products in dtype and
/// R, Z and Q in fp32 (WideSquare in backend.h), so without the cost of fp32 products.
///
/// As in torch.optim.Muon a norm below eps counts as eps, so that what is next to nothing makes no
/// full-sized update. With eps = 0 results do not depend on the scale of x (entries 1e-30 .. 1e30
/// and beyond). A zero matrix gives zero. A NaN or infinity makes its whole matrix NaN.
///
/// Deterministic; a matrix's result is bitwise the same alone and in a batch
/// (CPUs). Runs on x's device, on the current stream. Thread-safe. Records no
/// autograd and leaves `x` alone.
///
/// @param x  [..., m, n] fp64, fp32, bf16 or fp16, any strides; any dimension
///           may be 0. It is freed before the iteration begins where the caller
///           moves its last reference here.
/// @return   x's shape, contiguous, in options.dtype.
/// @throws InvalidArgument naming the first bad argument.
at::Tensor orthogonalize(at::Tensor x, const IterationOptions& options);

/// A Muon update, in place, by `orthogonalize` of the momentum's direction.
///
/// Bytes an element that are read and written beside the iteration's products, in bf16:
///
///   before it  14  one matrix by itself, on CPUs in fp32 and bf16: momentum in and out,
///                  gradient, X
///              26  else, of which batches on CPUs find 12 in caches: the direction out, in twice
///   after it    8  by kernels/, where the last product goes straight to the weights
///              12  else: its result out and in
///
/// @throws InvalidArgument naming the first tensor that is no fp32 of master's sizes and device;
///         and as orthogonalize.
void update(const Update& update, const IterationOptions& options);

}  // namespace dmuon::newton_schulz
