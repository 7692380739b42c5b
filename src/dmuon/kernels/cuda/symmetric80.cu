// Symmetric products of product.h for compute capability 8.0 and later, by their names in the
// cubin. Compiled without contraction into fused multiply-adds, as elementwise.cu.
#include "dmuon/kernels/cuda/product80.h"

using namespace dmuon::kernels::cuda;

// At least two blocks a multiprocessor, so that one multiplies while the other writes.
#define DMUON_SYMMETRIC(name, format, tile)                                   \
  extern "C" __global__ void __launch_bounds__(tile.threads(), 2)             \
      name(const __grid_constant__ ProductParameters p) {                     \
    device::Product80<device::format, tile, device::SymmetricResult>::run(p); \
  }
DMUON_SYMMETRIC(symmetric80_128_f16, Fp16, kProduct80Large)
DMUON_SYMMETRIC(symmetric80_128_bf16, BFloat16, kProduct80Large)
DMUON_SYMMETRIC(symmetric80_64_f16, Fp16, kProduct80Small)
DMUON_SYMMETRIC(symmetric80_64_bf16, BFloat16, kProduct80Small)
