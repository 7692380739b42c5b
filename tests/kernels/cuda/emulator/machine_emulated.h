#pragma once

// The machine of machine.h under the host's compiler: each access goes through the emulator's
// checks. Conversions have the bits of the GPU's; its NaNs too.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/kernels/cuda/emulator/emulator.h"
#include "tests/kernels/cuda/emulator/warp.h"

#define DMUON_DEVICE inline
#define DMUON_UNROLL
#define DMUON_UNROLL_BY(count)
#define DMUON_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace dmuon::kernels::cuda::machine {

using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

inline int thread() { return emulator::thread(); }
inline int block_x() { return emulator::block_x(); }
inline int block_y() { return emulator::block_y(); }

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
inline void store_u16(uint16_t* p, uint16_t v, DMUON_SITE) { store(p, v, file, line); }
inline void store_u16x4(uint16_t* p, const uint16_t (&v)[4], DMUON_SITE) {
  store(p, v, file, line);
}
inline uint32_t load_u32(const uint32_t* p, DMUON_SITE) { return load<uint32_t>(p, file, line); }
inline void store_u32(uint32_t* p, uint32_t v, DMUON_SITE) { store(p, v, file, line); }
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

inline uint16_t f16_of(float v) {
  if (v != v) return 0x7fff;
  const auto half = static_cast<_Float16>(v);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}
inline uint16_t bf16_of(float v) {
  if (v != v) return 0x7fff;
  const uint32_t bits = bits_of(v);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float float_of_f16(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}
inline float float_of_bf16(uint16_t bits) { return float_of(uint32_t{bits} << 16); }

}  // namespace dmuon::kernels::cuda::machine
