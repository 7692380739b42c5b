#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dmuon/newton_schulz/iteration.h"

namespace dmuon::newton_schulz {

using flops::Form;

/// A choice of how a matrix is orthogonalised. It depends on the matrix's shape, coefficients and
/// dtype, never on the batch: a matrix takes the same path alone and in a batch.
struct Choice {
  std::string backend;  ///< Products::name
  Form form = Form::kDirect;
  bool batched = false;         ///< True if the matrices of a call go together, not one by one
  std::int64_t panel_rows = 0;  ///< of symmetric products; see Products::panel_rows
  /// Elementwise::name; empty: elementwise_of. "cuda" is elementwise_of on an accelerator that
  /// lacks it.
  std::string elementwise = {};

  bool operator==(const Choice&) const = default;
};

/// Keys are the rows and columns of a matrix.
using Choices = std::map<std::pair<std::int64_t, std::int64_t>, Choice>;

inline constexpr double kDefaultEps = 1e-7;

struct IterationOptions {
  Coefficients coefficients;  ///< one row a step; none: the result is the normalised input
  double eps = kDefaultEps;   ///< at least 0 and finite; see orthogonalize
  at::ScalarType dtype = at::ScalarType::Float;  ///< fp64, fp32, bf16 or fp16
  std::optional<Choice> choice;                  ///< unset: the result of `choose`
  std::optional<Form> form;                      ///< replaces the choice's form
  /// dtype of kGram's R, Z and Q: fp32, fp64, or `dtype` itself. Unset: Products::gram_dtype.
  std::optional<at::ScalarType> gram_dtype;
};

/// Returns all choices for an m x n matrix. Each backend has the direct and the Gram form. It has
/// the segmented form if `measured_segments` knows the rows and the shape, and if the backend has
/// WideSquares (bf16) or panels (fp16). Each form runs one by one and, if the backend batches such
/// matrices, batched. The choice with the fewest FLOPs and the segmented form are also returned in
/// each of the backend's other panel heights. Each may be changed to any of elementwise_all.
std::vector<Choice> candidates(std::int64_t m, std::int64_t n, const Coefficients& coefficients,
                               c10::Device device, at::ScalarType dtype);

/// Returns the candidate that `orthogonalize` takes by default: the default backend's form with the
/// fewest FLOPs, batched if the backend does that, in its default panels. On accelerators it is
/// never the segmented form. Large matrices in the direct form are multiplied by dmuon's kernels
/// where these are preferred (prefers_cuda_kernels).
/// @param form  the form, if it is not to be chosen.
Choice choose(std::int64_t m, std::int64_t n, const Coefficients& coefficients, c10::Device device,
              at::ScalarType dtype, std::optional<Form> form = std::nullopt);

/// A choice that was checked and looked up, for matrices of one shape.
struct Method {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const Products& products;
  const Elementwise& elementwise;
  bool batched = false;
  Steps steps;
  at::ScalarType dtype{};  ///< of the iteration
  double eps = 0;          ///< of Elementwise::normalise

  /// Divides a batch into the pieces that go through the iteration together: matrices one by one,
  /// [rows, cols], or some of a batch, [b, ..., rows, cols]. Pieces are views. Tensors with equal
  /// leading dimensions have corresponding pieces.
  /// @param batch        [..., rows, cols], or other matrices with the same leading dimensions. An
  ///                     empty tensor has no pieces.
  /// @param matrix_dims  dimensions of one matrix, the last ones: 3 if its rows are in groups.
  std::vector<at::Tensor> pieces_of(const at::Tensor& batch, std::int64_t matrix_dims = 2) const;
};

/// Checks the members of `options` that depend on no shape.
/// @param function  the one that the user called.
/// @throws InvalidArgument naming `function` and the first bad member.
void check(const IterationOptions& options, std::string_view function);

/// Checks `options` and returns how they orthogonalise rows x cols matrices.
/// @param function  as for check().
/// @throws InvalidArgument as check().
Method method_for(std::int64_t rows, std::int64_t cols, c10::Device device,
                  const IterationOptions& options, std::string_view function);

}  // namespace dmuon::newton_schulz
