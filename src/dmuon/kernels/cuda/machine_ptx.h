#pragma once

#include <cstdint>

#define DMUON_DEVICE __device__ __forceinline__
#define DMUON_PRAGMA(text) _Pragma(#text)
#define DMUON_UNROLL DMUON_PRAGMA(unroll)
#define DMUON_UNROLL_BY(count) DMUON_PRAGMA(unroll count)
#define DMUON_NO_UNROLL DMUON_PRAGMA(unroll 1)

namespace dmuon::kernels::cuda::machine {

using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

DMUON_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
DMUON_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
DMUON_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
// Returns v. The compiler computes nothing from the result before this place, such as in front of a
// loop, where it would occupy registers.
DMUON_DEVICE int from_here(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
DMUON_DEVICE int num_blocks_x() { return static_cast<int>(gridDim.x); }

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
DMUON_DEVICE uint32_t load_u16x2(const uint16_t* p) {
  return *reinterpret_cast<const uint32_t*>(p);
}
DMUON_DEVICE void store_u16(uint16_t* p, uint16_t v) { *p = v; }
DMUON_DEVICE void store_u16x4(uint16_t* p, const uint16_t (&v)[4]) {
  *reinterpret_cast<ushort4*>(p) = make_ushort4(v[0], v[1], v[2], v[3]);
}
DMUON_DEVICE void load_u16x8(uint32_t (&pairs)[4], const uint16_t* p) {
  const uint4 four = *reinterpret_cast<const uint4*>(p);
  pairs[0] = four.x;
  pairs[1] = four.y;
  pairs[2] = four.z;
  pairs[3] = four.w;
}
DMUON_DEVICE void store_u16x8(uint16_t* p, const uint32_t (&pairs)[4]) {
  *reinterpret_cast<uint4*>(p) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
DMUON_DEVICE uint32_t load_u32(const uint32_t* p) { return *p; }
DMUON_DEVICE void store_u32(uint32_t* p, uint32_t v) { *p = v; }

// Past the L1, which other blocks' stores do not reach.
DMUON_DEVICE float load_f32_l2(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

DMUON_DEVICE void load_f32x2_l2(float (&v)[2], const float* p) {
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "l"(p) : "memory");
}
DMUON_DEVICE void load_f32x4_l2(float (&v)[4], const float* p) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "l"(p)
               : "memory");
}

extern __shared__ __align__(1024) uint32_t shared_words[];
DMUON_DEVICE void shared_store(int word, uint32_t v) { shared_words[word] = v; }
DMUON_DEVICE uint32_t shared_load(int word) { return shared_words[word]; }

DMUON_DEVICE void shared_load_x4(uint32_t (&v)[4], int word) {
  const uint4 four = *reinterpret_cast<const uint4*>(shared_words + word);
  v[0] = four.x;
  v[1] = four.y;
  v[2] = four.z;
  v[3] = four.w;
}
DMUON_DEVICE uint32_t shared_address(int word) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared_words + word));
}

// Copies `bytes` bytes and zeros up to 16, to a word that is a multiple of 4. The source is aligned
// to 16 bytes. A thread's copies since the last commit make a group; wait_copies<n> waits for all
// groups of this thread but the last n, and other threads see them after a barrier.
DMUON_DEVICE void copy_async(int word, const uint16_t* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(word)),
               "l"(__cvta_generic_to_global(source)), "r"(bytes)
               : "memory");
}
DMUON_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
DMUON_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// All threads of a warp call it. Thread 8 m + i names the word where row i of the 8 x 8 matrix m
// begins, a multiple of 4. Thread l gets in v[m] two neighbours of row l / 4, from column l % 4 * 2
// on; of the transposed matrix in the second function.
DMUON_DEVICE void load_matrices(uint32_t (&v)[4], int word) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(shared_address(word))
               : "memory");
}
DMUON_DEVICE void load_matrices_transposed(uint32_t (&v)[4], int word) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(shared_address(word))
               : "memory");
}

// sums += a b, 16 x 8 in fp32, where a is 16 x 16 and b is 16 x 8; all threads of a warp call it.
// Thread l has sums in row l / 4 (the last two: 8 rows further), columns l % 4 * 2 and the next. As
// matrices in load_matrices' order, a is {upper left, lower left, upper right, lower right}, and b
// is the upper and the lower half, transposed.
#define DMUON_MULTIPLY_ADD(format)                                                      \
  DMUON_DEVICE void multiply_add_##format(float(&sums)[4], const uint32_t(&a)[4],       \
                                          const uint32_t(&b)[2]) {                      \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #format "." #format           \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));   \
  }
DMUON_MULTIPLY_ADD(f16)
DMUON_MULTIPLY_ADD(bf16)
#undef DMUON_MULTIPLY_ADD

DMUON_DEVICE void barrier() { __syncthreads(); }
// All threads of the warp call it.
DMUON_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) {
  return __shfl_xor_sync(0xffffffffU, v, mask);
}
// Orders this thread's accesses for threads of other blocks. __threadfence() would also agree on
// one order of all fences, which takes longer.
DMUON_DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DMUON_DEVICE uint32_t atomic_add(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
// fence(), atomic_add, fence() in one.
DMUON_DEVICE uint32_t atomic_add_fenced(uint32_t* p, uint32_t v) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(p)), "r"(v)
               : "memory");
  return before;
}

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
// `low` in the lower 16 bits.
DMUON_DEVICE uint32_t f16_pair_of(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DMUON_DEVICE uint32_t bf16_pair_of(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DMUON_DEVICE float float_of_f16(uint16_t half) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
  return v;
}
DMUON_DEVICE float float_of_bf16(uint16_t half) { return float_of(uint32_t{half} << 16); }

}  // namespace dmuon::kernels::cuda::machine

#include "dmuon/kernels/cuda/machine_ptx90.h"
