#pragma once

#include <cstdint>

#define DMUON_DEVICE __device__ __forceinline__

namespace dmuon::kernels::cuda::machine {

using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

DMUON_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
DMUON_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
DMUON_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }

DMUON_DEVICE float load_f32(const float* p) { return *p; }
DMUON_DEVICE void load_f32x4(float (&v)[4], const float* p) {
  const float4 four = *reinterpret_cast<const float4*>(p);
  v[0] = four.x;
  v[1] = four.y;
  v[2] = four.z;
  v[3] = four.w;
}
DMUON_DEVICE void store_f32(float* p, float v) { *p = v; }
DMUON_DEVICE void store_f32x4(float* p, const float (&v)[4]) {
  *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
}

DMUON_DEVICE uint8_t load_u8(const uint8_t* p) { return *p; }
DMUON_DEVICE uint16_t load_u16(const uint16_t* p) { return *p; }
DMUON_DEVICE void load_u16x4(uint16_t (&v)[4], const uint16_t* p) {
  const ushort4 four = *reinterpret_cast<const ushort4*>(p);
  v[0] = four.x;
  v[1] = four.y;
  v[2] = four.z;
  v[3] = four.w;
}
DMUON_DEVICE void store_u16(uint16_t* p, uint16_t v) { *p = v; }
DMUON_DEVICE void store_u16x4(uint16_t* p, const uint16_t (&v)[4]) {
  *reinterpret_cast<ushort4*>(p) = make_ushort4(v[0], v[1], v[2], v[3]);
}
DMUON_DEVICE uint32_t load_u32(const uint32_t* p) { return *p; }
DMUON_DEVICE void store_u32(uint32_t* p, uint32_t v) { *p = v; }

// Past the L1, which other blocks' stores do not reach.
DMUON_DEVICE float load_f32_l2(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

extern __shared__ uint32_t shared_words[];
DMUON_DEVICE void shared_store(int word, uint32_t v) { shared_words[word] = v; }
DMUON_DEVICE uint32_t shared_load(int word) { return shared_words[word]; }

DMUON_DEVICE void barrier() { __syncthreads(); }
// All threads of the warp call it.
DMUON_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) {
  return __shfl_xor_sync(0xffffffffU, v, mask);
}
// Orders this thread's accesses for threads of other blocks.
DMUON_DEVICE void fence() { __threadfence(); }
DMUON_DEVICE uint32_t atomic_add(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }

DMUON_DEVICE uint32_t bits_of(float v) { return __float_as_uint(v); }
DMUON_DEVICE float float_of(uint32_t v) { return __uint_as_float(v); }

DMUON_DEVICE float square_root(float v) { return __fsqrt_rn(v); }
DMUON_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// NaN becomes 0x7fff.
DMUON_DEVICE uint16_t f16_of(float v) {
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
  return half;
}
DMUON_DEVICE uint16_t bf16_of(float v) {
  uint16_t half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
  return half;
}
DMUON_DEVICE float float_of_f16(uint16_t half) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
  return v;
}
DMUON_DEVICE float float_of_bf16(uint16_t half) { return float_of(uint32_t{half} << 16); }

}  // namespace dmuon::kernels::cuda::machine
