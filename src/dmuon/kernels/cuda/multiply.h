#pragma once

#include "dmuon/kernels/cuda/formats.h"
#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda::device {

/// See MultiplyParameters.
template <typename Format>
DMUON_DEVICE void multiply(const MultiplyParameters& p) {
  const float factor = machine::load_f32(p.factors + machine::block_y() * p.factor_stride);
  const auto product = [&](std::uint32_t half) {
    return std::uint32_t{Format::narrow(factor * Format::wide(static_cast<std::uint16_t>(half)))};
  };
  std::uint16_t* const x = p.x + static_cast<std::int64_t>(machine::block_y()) * p.num_eights * 8;
  const int first = machine::block_x() * kMultiplyThreads * kMultiplyEights + machine::thread();
  std::uint32_t pairs[kMultiplyEights][4];
  DMUON_UNROLL
  for (int i = 0; i < kMultiplyEights; ++i) {
    const int eight = first + i * kMultiplyThreads;
    if (eight < p.num_eights) machine::load_u16x8(pairs[i], x + std::int64_t{8} * eight);
  }
  DMUON_UNROLL
  for (int i = 0; i < kMultiplyEights; ++i) {
    const int eight = first + i * kMultiplyThreads;
    if (eight >= p.num_eights) continue;
    DMUON_UNROLL
    for (std::uint32_t& pair : pairs[i]) pair = product(pair & 0xffffU) | product(pair >> 16) << 16;
    machine::store_u16x8(x + std::int64_t{8} * eight, pairs[i]);
  }
}

}  // namespace dmuon::kernels::cuda::device
