#pragma once

#include <cstdint>

// Parameters of kernels: plain C++, which nvcc, the host's launches and the tests' emulator read.
namespace dmuon::kernels::cuda {

/// w <- decay w + factor u where *applies is not 0; else no byte of w is written. Each product and
/// the sum round to fp32.
///
/// Grid: (blocks of kMoveWeightsThreads items, batch). An item is `width` neighbours of a row.
struct MoveWeightsParameters {
  float* w;                ///< [batch][rows][cols]
  const std::uint16_t* u;  ///< [batch][rows][cols], in the kernel's 16-bit format
  const std::uint8_t* applies;
  std::int64_t w_row_stride;  ///< strides in elements
  std::int64_t w_batch_stride;
  std::int64_t u_row_stride;
  std::int64_t u_batch_stride;
  int rows;
  int cols;
  int width;  ///< 4 if each row of w is aligned to 16 bytes and each of u to 8; else 1
  float decay;
  float factor;
};

inline constexpr int kMoveWeightsThreads = 256;

}  // namespace dmuon::kernels::cuda
