// The kernels of elementwise.h, by their names in the cubin. Compiled without contraction into
// fused multiply-adds, so that the host's emulation has the same bits.
#include "dmuon/kernels/cuda/move_weights.h"

using namespace dmuon::kernels::cuda;

extern "C" __global__ void __launch_bounds__(kMoveWeightsThreads)
    move_weights_f16(const __grid_constant__ MoveWeightsParameters p) {
  device::move_weights<device::Fp16>(p);
}

extern "C" __global__ void __launch_bounds__(kMoveWeightsThreads)
    move_weights_bf16(const __grid_constant__ MoveWeightsParameters p) {
  device::move_weights<device::BFloat16>(p);
}
