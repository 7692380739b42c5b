// Full products of product.h for compute capability 8.0 and later, by their names in the cubin.
// Compiled without contraction into fused multiply-adds, as elementwise.cu.
#include "dmuon/kernels/cuda/product80.h"

using namespace dmuon::kernels::cuda;

// Two blocks a multiprocessor, as symmetric80.cu.
#define DMUON_FULL(name, format, tile)                                   \
  extern "C" __global__ void __launch_bounds__(tile.threads(), 2)        \
      name(const __grid_constant__ ProductParameters p) {                \
    device::Product80<device::format, tile, device::FullResult>::run(p); \
  }
DMUON_FULL(full80_128_f16, Fp16, kProduct80Large)
DMUON_FULL(full80_128_bf16, BFloat16, kProduct80Large)
