#pragma once

#include <cstdint>

namespace dmuon::kernels::cuda {

// Elementwise kernels of an update, in fp32 arithmetic. Each adds one kernel to a stream, allocates
// nothing and never waits, so a stream may be captured after `prepare` (library.h). Pointers are
// the device's, and must stay valid until the kernel has run. Thread-safe.

enum class Half { kFp16, kBFloat16 };

/// w <- decay w + factor u for each entry where *applies is not 0; otherwise no byte of w changes.
/// decay w, factor u and their sum each round to fp32: no fused multiply-add.
/// Reads and writes w, reads u: 10 bytes an element.
struct MoveWeights {
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  /// Entry (b, i, j) is w[b * w_batch_stride + i * w_row_stride + j]; entries do not overlap.
  float* w = nullptr;
  std::int64_t w_row_stride = 0;
  std::int64_t w_batch_stride = 0;
  /// [batch, rows, cols] in `u_format`, with strides of its own; does not overlap w.
  const void* u = nullptr;
  Half u_format = Half::kFp16;
  std::int64_t u_row_stride = 0;
  std::int64_t u_batch_stride = 0;
  float decay = 1;
  float factor = 0;
  const std::uint8_t* applies = nullptr;  ///< one byte on the device
};

/// Fastest if rows of w start at multiples of 16 bytes and rows of u at multiples of 8.
/// @throws InvalidArgument if a size or stride is negative, a pointer is null or not aligned to its
///         entries, the batch exceeds 65535, or a matrix exceeds 2^31 - 1 entries.
/// @throws CudaError from `launch`.
void move_weights(const MoveWeights& move, int device, void* stream);

}  // namespace dmuon::kernels::cuda
