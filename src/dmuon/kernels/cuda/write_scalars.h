#pragma once

#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda::device {

/// See ScalarsParameters.
DMUON_DEVICE void write_scalars(const ScalarsParameters& p) {
  for (int i = machine::thread(); i < p.count; i += kScalarsThreads)
    machine::store_f32(p.out + i, p.values[i]);
}

}  // namespace dmuon::kernels::cuda::device
