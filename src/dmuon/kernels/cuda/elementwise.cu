// The kernels of elementwise.h, by their names in the cubin. Compiled without contraction into
// fused multiply-adds, so that the host's emulation has the same bits.
#include "dmuon/kernels/cuda/direction.h"
#include "dmuon/kernels/cuda/move_weights.h"
#include "dmuon/kernels/cuda/multiply.h"
#include "dmuon/kernels/cuda/write_scalars.h"

using namespace dmuon::kernels::cuda;

// Blocks that fill a multiprocessor, so registers do not limit the loads in flight.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kMoveWeightsBlocks = 1536 / kMoveWeightsThreads;
#else
constexpr int kMoveWeightsBlocks = 2048 / kMoveWeightsThreads;
#endif

extern "C" __global__ void __launch_bounds__(kScalarsThreads)
    write_scalars(const __grid_constant__ ScalarsParameters p) {
  device::write_scalars(p);
}

extern "C" __global__ void __launch_bounds__(kMoveWeightsThreads, kMoveWeightsBlocks)
    move_weights_f16(const __grid_constant__ MoveWeightsParameters p) {
  device::MoveWeights<device::Fp16>::run(p);
}

extern "C" __global__ void __launch_bounds__(kMoveWeightsThreads, kMoveWeightsBlocks)
    move_weights_bf16(const __grid_constant__ MoveWeightsParameters p) {
  device::MoveWeights<device::BFloat16>::run(p);
}

extern "C" __global__ void __launch_bounds__(kMultiplyThreads)
    multiply_f16(const __grid_constant__ MultiplyParameters p) {
  device::multiply<device::Fp16>(p);
}

extern "C" __global__ void __launch_bounds__(kMultiplyThreads)
    multiply_bf16(const __grid_constant__ MultiplyParameters p) {
  device::multiply<device::BFloat16>(p);
}

#define DMUON_DIRECTION(name, format, run, blocks)                        \
  extern "C" __global__ void __launch_bounds__(kDirectionThreads, blocks) \
      name(const __grid_constant__ DirectionParameters p) {               \
    device::Direction<device::format>::run(p);                            \
  }
DMUON_DIRECTION(direction_f16, Fp16, run, kDirectionBlocks)
DMUON_DIRECTION(direction_again_f16, Fp16, run_again, 1)
DMUON_DIRECTION(direction_bf16, BFloat16, run, kDirectionBlocks)
DMUON_DIRECTION(direction_again_bf16, BFloat16, run_again, 1)
