#pragma once

#include "dmuon/kernels/cuda/formats.h"
#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda::device {

template <typename Format>
DMUON_DEVICE float moved(const MoveWeightsParameters& p, float w, std::uint16_t u) {
  return p.decay * w + p.factor * Format::wide(u);
}

/// See MoveWeightsParameters.
template <typename Format>
DMUON_DEVICE void move_weights(const MoveWeightsParameters& p) {
  if (machine::load_u8(p.applies) == 0) return;
  const int items = (p.cols + p.width - 1) / p.width;  // a row's
  const unsigned item =
      static_cast<unsigned>(machine::block_x()) * kMoveWeightsThreads + machine::thread();
  const auto row = static_cast<int>(item / items);
  if (row >= p.rows) return;
  const int col = static_cast<int>(item % items) * p.width;
  float* const w = p.w + machine::block_y() * p.w_batch_stride + row * p.w_row_stride + col;
  const std::uint16_t* const u =
      p.u + machine::block_y() * p.u_batch_stride + row * p.u_row_stride + col;
  if (p.width == 4 && col + 4 <= p.cols) {
    float old[4];
    std::uint16_t update[4];
    machine::load_f32x4(old, w);
    machine::load_u16x4(update, u);
    const float four[4] = {moved<Format>(p, old[0], update[0]), moved<Format>(p, old[1], update[1]),
                           moved<Format>(p, old[2], update[2]),
                           moved<Format>(p, old[3], update[3])};
    machine::store_f32x4(w, four);
    return;
  }
  for (int i = 0; i < p.width && col + i < p.cols; ++i) {
    machine::store_f32(w + i, moved<Format>(p, machine::load_f32(w + i), machine::load_u16(u + i)));
  }
}

}  // namespace dmuon::kernels::cuda::device
