#pragma once

// The machine of machine.h under the host's compiler: each access goes through the emulator's
// checks. Conversions have the bits of the GPU's; its NaNs too.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/kernels/cuda/emulator/emulator.h"
#include "tests/kernels/cuda/emulator/warp.h"
#include "tests/kernels/cuda/emulator/warpgroup.h"

#define DMUON_DEVICE inline
#define DMUON_UNROLL
#define DMUON_NO_UNROLL
#define DMUON_UNROLL_BY(count)
#define DMUON_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace dmuon::kernels::cuda::machine {

using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

inline int thread() { return emulator::thread(); }
inline int block_x() { return emulator::block_x(); }
inline int block_y() { return emulator::block_y(); }
inline int num_blocks_x() { return emulator::num_blocks_x(); }
inline int from_here(int v) { return v; }

template <typename T>
T load(const void* p, const char* file, int line) {
  T v;
  std::memcpy(&v, emulator::read(p, sizeof v, {file, line}), sizeof v);
  return v;
}
template <typename T>
void store(void* p, const T& v, const char* file, int line) {
  std::memcpy(emulator::write(p, sizeof v, {file, line}), &v, sizeof v);
}

inline float load_f32(const float* p, DMUON_SITE) { return load<float>(p, file, line); }
inline void load_f32x4(float (&v)[4], const float* p, DMUON_SITE) {
  std::memcpy(v, emulator::read(p, sizeof v, {file, line}), sizeof v);
}
inline void store_f32(float* p, float v, DMUON_SITE) { store(p, v, file, line); }
inline void store_f32x4(float* p, const float (&v)[4], DMUON_SITE) { store(p, v, file, line); }
inline uint8_t load_u8(const uint8_t* p, DMUON_SITE) { return load<uint8_t>(p, file, line); }
inline uint16_t load_u16(const uint16_t* p, DMUON_SITE) { return load<uint16_t>(p, file, line); }
inline void load_u16x4(uint16_t (&v)[4], const uint16_t* p, DMUON_SITE) {
  std::memcpy(v, emulator::read(p, sizeof v, {file, line}), sizeof v);
}
inline uint32_t load_u16x2(const uint16_t* p, DMUON_SITE) { return load<uint32_t>(p, file, line); }
inline void store_u16(uint16_t* p, uint16_t v, DMUON_SITE) { store(p, v, file, line); }
inline void store_u16x4(uint16_t* p, const uint16_t (&v)[4], DMUON_SITE) {
  store(p, v, file, line);
}
inline uint32_t load_u32(const uint32_t* p, DMUON_SITE) { return load<uint32_t>(p, file, line); }
inline void store_u32(uint32_t* p, uint32_t v, DMUON_SITE) { store(p, v, file, line); }
inline void load_u16x8(uint32_t (&pairs)[4], const uint16_t* p, DMUON_SITE) {
  std::memcpy(pairs, emulator::read(p, sizeof pairs, {file, line}), sizeof pairs);
}
inline void store_u16x8(uint16_t* p, const uint32_t (&pairs)[4], DMUON_SITE) {
  store(p, pairs, file, line);
}
inline float load_f32_l2(const float* p, DMUON_SITE) { return load<float>(p, file, line); }
inline void load_f32x2_l2(float (&v)[2], const float* p, DMUON_SITE) {
  std::memcpy(v, emulator::read(p, sizeof v, {file, line}), sizeof v);
}
inline void load_f32x4_l2(float (&v)[4], const float* p, DMUON_SITE) {
  std::memcpy(v, emulator::read(p, sizeof v, {file, line}), sizeof v);
}

inline void shared_store(int word, uint32_t v, DMUON_SITE) {
  emulator::shared_store(word, v, {file, line});
}
inline uint32_t shared_load(int word, DMUON_SITE) {
  return emulator::shared_load(word, {file, line});
}
inline void shared_load_x4(uint32_t (&v)[4], int word, DMUON_SITE) {
  emulator::shared_load(v, word, {file, line});
}
inline void copy_async(int word, const uint16_t* source, int bytes, DMUON_SITE) {
  emulator::copy_async(word, source, bytes, {file, line});
}
inline void commit_copies() { emulator::commit_copies(); }
template <int kPending>
void wait_copies() {
  emulator::wait_copies(kPending);
}

inline void load_matrices(uint32_t (&v)[4], int word, DMUON_SITE) {
  emulator::load_matrices(v, word, false, {file, line});
}
inline void load_matrices_transposed(uint32_t (&v)[4], int word, DMUON_SITE) {
  emulator::load_matrices(v, word, true, {file, line});
}
inline void multiply_add_f16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             DMUON_SITE) {
  emulator::multiply_add(sums, a, b, emulator::Narrow::kF16, {file, line});
}
inline void multiply_add_bf16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              DMUON_SITE) {
  emulator::multiply_add(sums, a, b, emulator::Narrow::kBF16, {file, line});
}

inline void barrier(DMUON_SITE) { emulator::barrier({file, line}); }
inline uint32_t shuffle_xor(uint32_t v, int mask, DMUON_SITE) {
  return emulator::shuffle_xor(v, mask, {file, line});
}
inline void fence() { emulator::fence(); }
inline uint32_t atomic_add(uint32_t* p, uint32_t v, DMUON_SITE) {
  return emulator::atomic_add(p, v, {file, line});
}

inline uint32_t atomic_add_fenced(uint32_t* p, uint32_t v, DMUON_SITE) {
  emulator::fence();
  const uint32_t before = emulator::atomic_add(p, v, {file, line});
  emulator::fence();
  return before;
}

// Of compute capability 9.0.

inline void let_next_kernel_begin() {}
inline void wait_for_kernel_before() { emulator::wait_for_kernel_before(); }
inline void prefetch_map(const TensorMap&) {}

inline int cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_barrier(DMUON_SITE) { emulator::cluster_barrier({file, line}); }
inline void named_barrier(int id, int threads, DMUON_SITE) {
  emulator::named_barrier(id, threads, {file, line});
}
inline void mbarrier_init(int word, uint32_t count, DMUON_SITE) {
  emulator::mbarrier_init(word, count, {file, line});
}
inline void mbarrier_init_fence() { emulator::mbarrier_init_fence(); }
inline void mbarrier_expect(int word, uint32_t bytes, DMUON_SITE) {
  emulator::mbarrier_arrive(word, emulator::cluster_rank(), bytes, {file, line});
}
inline void mbarrier_arrive(int word, int rank, DMUON_SITE) {
  emulator::mbarrier_arrive(word, rank, 0, {file, line});
}
inline void mbarrier_wait(int word, uint32_t parity, DMUON_SITE) {
  emulator::mbarrier_wait(word, parity, {file, line});
}
inline void copy_tile(int word, const TensorMap& map, int mbarrier, int col, int row, int matrix,
                      DMUON_SITE) {
  emulator::copy_tile(word, map, mbarrier, col, row, matrix, false, {file, line});
}
inline void copy_tile_to_both(int word, const TensorMap& map, int mbarrier, int col, int row,
                              int matrix, DMUON_SITE) {
  emulator::copy_tile(word, map, mbarrier, col, row, matrix, true, {file, line});
}

// Address in units of 16 bytes; at bit 16 the bytes from 64 rows of a transposed operand to the
// next, in these units, else 1; 1024 bytes from 8 rows to the next 8, at bit 32; the swizzle of 128
// bytes is 1, at bit 62.
template <bool kTransposed = false>
uint64_t matrix_descriptor(int word) {
  return uint64_t{static_cast<uint32_t>(word) / 4 & 0x3fff} |
         uint64_t{kTransposed ? 64 * 128 / 16 : 1} << 16 | uint64_t{1024 / 16} << 32 |
         uint64_t{1} << 62;
}
inline void wgmma_fence(DMUON_SITE) { emulator::multiplication_fence({file, line}); }
inline void wgmma_commit(DMUON_SITE) { emulator::commit_multiplications({file, line}); }
template <int kPending>
void wgmma_wait(DMUON_SITE) {
  emulator::wait_multiplications(kPending, {file, line});
}
#define DMUON_MULTIPLY(cols, name, format)                                         \
  template <bool kTransposedA = false, bool kTransposedB = kTransposedA>           \
  void multiply_64x##cols##_##name(float(&sums)[cols / 2], uint64_t a, uint64_t b, \
                                   bool accumulate, DMUON_SITE) {                  \
    emulator::multiply({sums,                                                      \
                        cols,                                                      \
                        {a, kTransposedA},                                         \
                        {b, kTransposedB},                                         \
                        accumulate,                                                \
                        emulator::Narrow::format,                                  \
                        emulator::Site{file, line}});                              \
  }
DMUON_MULTIPLY(128, f16, kF16)
DMUON_MULTIPLY(128, bf16, kBF16)
DMUON_MULTIPLY(256, f16, kF16)
DMUON_MULTIPLY(256, bf16, kBF16)
#undef DMUON_MULTIPLY

template <int kRegisters>
void take_registers(DMUON_SITE) {
  emulator::change_registers(kRegisters, true, {file, line});
}
template <int kRegisters>
void give_registers(DMUON_SITE) {
  emulator::change_registers(kRegisters, false, {file, line});
}

inline uint32_t bits_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline float square_root(float v) { return std::sqrt(v); }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

inline uint16_t f16_of(float v, DMUON_SITE) {
  if (v != v) {
    emulator::check_nan(v, {file, line});
    return 0x7fff;
  }
  const auto half = static_cast<_Float16>(v);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}
inline uint16_t bf16_of(float v, DMUON_SITE) {
  if (v != v) {
    emulator::check_nan(v, {file, line});
    return 0x7fff;
  }
  const uint32_t bits = bits_of(v);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t f16_pair_of(float low, float high) {
  return f16_of(low) | uint32_t{f16_of(high)} << 16;
}
inline uint32_t bf16_pair_of(float low, float high) {
  return bf16_of(low) | uint32_t{bf16_of(high)} << 16;
}
inline float float_of_f16(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}
inline float float_of_bf16(uint16_t bits) { return float_of(uint32_t{bits} << 16); }

}  // namespace dmuon::kernels::cuda::machine
