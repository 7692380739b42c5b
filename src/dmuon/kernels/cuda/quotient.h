#pragma once

#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda::device {

/// n / divisor for n in [0, 2^31): an integer division takes some twenty instructions, this three.
DMUON_DEVICE int quotient(int n, const Divisor& divisor) {
  const std::uint64_t doubled = std::uint32_t{2} * static_cast<std::uint32_t>(n);
  return static_cast<int>(static_cast<std::uint32_t>(doubled * divisor.multiplier >> 32) >>
                          divisor.shift);
}

}  // namespace dmuon::kernels::cuda::device
