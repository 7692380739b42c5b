// Symmetric products of product.h for compute capability 9.0, by their names in the cubin. Compiled
// without contraction into fused multiply-adds, as elementwise.cu.
#include "dmuon/kernels/cuda/product90.h"

using namespace dmuon::kernels::cuda;

#define DMUON_SYMMETRIC(name, format, transposed)                                               \
  extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kProduct90Threads, 1)  \
      name(const __grid_constant__ Product90Parameters p) {                                     \
    device::Product90<device::format, transposed, transposed, device::SymmetricResult>::run(p); \
  }
DMUON_SYMMETRIC(symmetric90_f16, Fp16, false)
DMUON_SYMMETRIC(symmetric90_bf16, BFloat16, false)
DMUON_SYMMETRIC(symmetric90_transposed_f16, Fp16, true)
DMUON_SYMMETRIC(symmetric90_transposed_bf16, BFloat16, true)
