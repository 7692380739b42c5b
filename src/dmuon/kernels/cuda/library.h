#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda {

// The kernels that dmuon carries: cubins inside this library, which the CUDA driver loads. All
// functions are thread-safe.

/// Returns why no kernel runs on `device`, in one sentence; empty if all kernels run there.
/// Reasons: no driver, a driver before CUDA 12.0 or that does not start, a compute capability below
/// 8.0 or without a cubin, a driver that refuses the cubins, a build without a working nvcc. Loads
/// the kernels.
std::string unavailable(int device);

/// Loads all kernels for `device`, if this has not been done. Call it before a stream is captured:
/// the driver loads nothing during a capture.
/// @throws CudaError if a kernel cannot be loaded.
void prepare(int device);

/// @throws CudaError if the device does not answer.
int num_multiprocessors(int device);

/// True if the kernels of product90.h run on the device; false without a driver or an answer.
/// Loads nothing.
bool has_product90(int device);

/// Matrices of 16-bit entries, [batch, rows, cols], as TMA shall find them; strides in entries.
struct Mapped {
  const void* data;
  Half format;
  std::int64_t batch;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t row_stride;
  std::int64_t batch_stride;
  int box_rows;  ///< a box has kProduct90Depth columns
};

/// @throws CudaError if the driver refuses them.
TensorMap tensor_map(const Mapped& mapped);

/// True if what is added to the stream is captured, or cannot be added. False in a thread without a
/// context, which has added nothing.
bool is_captured(void* stream);

/// The most matrices of a batch: blocks along y.
inline constexpr std::int64_t kMaxBatch = 65535;

struct Launch {
  const char* kernel = nullptr;  ///< a name in a .cu file
  unsigned grid_x = 1;
  unsigned grid_y = 1;
  unsigned threads = 0;  ///< a block's
  unsigned shared_bytes = 0;
  /// The kernel may begin before the one in front of it in the stream has ended, for whose end it
  /// waits itself. Compute capability 9.0 or later.
  bool begins_early = false;
};

/// Adds a kernel to a stream, and returns before it runs. `parameters` is the kernel's one
/// parameter, of `bytes` bytes, and is copied. `stream` is a cudaStream_t of `device`. Makes the
/// device's primary context current in a thread that has none. Allowed during a capture after
/// `prepare`.
/// @throws CudaError with the kernel's name and the driver's error.
void launch(const Launch& launch, const void* parameters, std::size_t bytes, int device,
            void* stream);

}  // namespace dmuon::kernels::cuda
