#pragma once

#include <cstdint>
#include <span>

#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda {

// Elementwise kernels of an update, in fp32 arithmetic. Each adds kernels to a stream, allocates
// nothing and never waits, so a stream may be captured after `prepare` (library.h). Pointers are
// the device's, and must stay valid until the kernel has run. Thread-safe.

/// Writes numbers to the device, where the kernels below read those that change from step to step.
/// The launches carry them, so no memory of the host has to live until these have run: one launch
/// for each kMostScalars (parameters.h).
/// @param out  [values] on the device.
/// @throws as move_weights.
void write_scalars(std::span<const float> values, float* out, int device, void* stream);

/// w <- *decay w + (*factor scale scales[b]) u for each entry where *applies is not 0; otherwise no
/// byte of w changes. Each product and the sum round to fp32: no fused multiply-add.
/// Reads and writes w, reads u: 10 bytes an element.
struct MoveWeights {
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  /// Entry (b, i, j) is w[b / inner_batch * w_batch_stride + b % inner_batch * w_inner_stride + i *
  /// w_row_stride + j]; entries do not overlap.
  float* w = nullptr;
  std::int64_t w_row_stride = 0;
  std::int64_t inner_batch = 1;
  std::int64_t w_inner_stride = 0;
  std::int64_t w_batch_stride = 0;
  /// [batch, rows, cols] in `u_format`, with strides of its own; does not overlap w.
  const void* u = nullptr;
  Half u_format = Half::kFp16;
  std::int64_t u_row_stride = 0;
  std::int64_t u_inner_stride = 0;
  std::int64_t u_batch_stride = 0;
  const float* decay = nullptr;   ///< one on the device
  const float* factor = nullptr;  ///< one on the device
  float scale = 1;
  const float* scales = nullptr;  ///< [batch] on the device, scale_stride apart; null: 1
  std::int64_t scale_stride = 0;
  const std::uint8_t* applies = nullptr;  ///< one byte on the device
};

/// Fastest if rows of w start at multiples of 16 bytes and rows of u at multiples of 8.
/// @throws InvalidArgument if a size or stride is negative, a pointer is null or not aligned to its
///         entries, the batch exceeds 65535, or a matrix exceeds 2^31 - 1024 entries.
/// @throws CudaError from `launch`.
void move_weights(const MoveWeights& move, int device, void* stream);

/// x <- factor x, rounded once to `format`. Reads and writes x: 4 bytes an element.
struct Multiply {
  std::int64_t batch = 1;
  std::int64_t entries = 0;  ///< of a matrix, a multiple of 8
  void* x = nullptr;         ///< [batch, entries] contiguous, at a multiple of 16 bytes
  Half format = Half::kFp16;
  const float* factors = nullptr;  ///< [batch] on the device, factor_stride apart
  std::int64_t factor_stride = 0;
};

/// @throws as move_weights.
void multiply(const Multiply& multiply, int device, void* stream);

/// The momentum moves, and x becomes the direction (torch.optim.Muon's), scaled:
///
///     momentum <- momentum + rest (factor gradient - momentum)
///     d = factor gradient + (1 - rest) (momentum - factor gradient) with nesterov, else momentum
///     x = s d;  memo[kMemoInverse] = 1 / max(|x|, s eps), or 1 of a zero matrix
///
/// Without a gradient factor momentum has the bits of torch.lerp.
///
/// The scale s of each matrix is the power of two that puts x's largest entry in [2^14, 2^15), or
/// as near as fp32's exponents allow. Where *applies is 0, momentum keeps its bits, and d is
/// momentum. A NaN or infinity of d makes memo[kMemoInverse] x NaN in all or some entries.
///
/// Reads gradient, reads and writes momentum, writes x: 14 bytes an element, and 10 more of a
/// matrix whose s is not that of the last step.
struct DirectionOf {
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  /// Entry (b, i, j) is [b / inner_batch * batch_stride + b % inner_batch * inner_stride + i *
  /// row_stride + j], in both.
  const float* gradient = nullptr;
  float* momentum = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t inner_batch = 1;
  std::int64_t inner_stride = 0;
  std::int64_t batch_stride = 0;
  void* x =
      nullptr;  ///< [batch, x_rows, x_cols] contiguous; what is beyond the matrix becomes zeros
  Half x_format = Half::kFp16;
  std::int64_t x_rows = 0;
  std::int64_t x_cols = 0;      ///< a multiple of 4
  float* memo = nullptr;        ///< [batch, kMemoWords]; zeros before the first step
  float* squares = nullptr;     ///< [batch] becomes memo[kMemoInverse] squared; null: not wanted
  float* partial = nullptr;     ///< partial_words(*this) words of scratch memory
  const float* rest = nullptr;  ///< one on the device, 1 - mu rounded to fp32
  bool nesterov = true;
  double eps = 0;
  const float* gradient_factor = nullptr;  ///< one on the device; null: 1
  const std::uint8_t* applies = nullptr;   ///< one byte on the device
};
std::int64_t partial_words(const DirectionOf& direction);

/// Adds two kernels to the stream.
/// @throws as move_weights.
void direction(const DirectionOf& direction, int device, void* stream);

}  // namespace dmuon::kernels::cuda
