#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dmuon/core/divided_up.h"

// The functions name their instruction set, so that all else is compiled for any processor; what is
// inlined into them must name it too.
#define DMUON_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define DMUON_AVX512_INLINE DMUON_AVX512 inline __attribute__((always_inline))

namespace dmuon::kernels::cpu::avx512 {

constexpr std::int64_t kLanes = 16;  // words of a register: one fp32 or two bf16 entries each

using core::divided_up;

/// The first lanes, at most all.
DMUON_AVX512_INLINE __mmask16 first(std::int64_t lanes) {
  return static_cast<__mmask16>(lanes >= kLanes ? 0xffff : (1 << lanes) - 1);
}

/// The word at `from` in all lanes.
DMUON_AVX512_INLINE __m512i in_all_lanes(const std::byte* from) {
  std::int32_t word;
  std::memcpy(&word, from, sizeof(word));
  return _mm512_set1_epi32(word);
}

/// A dtype: how its words are multiplied, and its entries read and written, 16 at a time. A sum of
/// kSumWords words is added to the next one's: errors grow with longer sums.
struct Fp32 {
  static constexpr std::int64_t kSize = 4;
  static constexpr std::int64_t kSumWords = 128;

  DMUON_AVX512_INLINE static __m512 multiplied(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  DMUON_AVX512_INLINE static __m512 load(__mmask16 mask, const std::byte* from) {
    return _mm512_maskz_loadu_ps(mask, from);
  }
  DMUON_AVX512_INLINE static void store(std::byte* to, __mmask16 mask, __m512 value) {
    _mm512_mask_storeu_ps(to, mask, value);
  }
  // The word of each of 16 vectors that begins at `from`; its second entry would be a stride on.
  DMUON_AVX512_INLINE static __m512i word(__mmask16 mask, const std::byte* from, std::int64_t,
                                          bool) {
    return _mm512_maskz_loadu_epi32(mask, from);
  }
};

struct Bf16 {
  static constexpr std::int64_t kSize = 2;
  static constexpr std::int64_t kSumWords = 384;

  DMUON_AVX512_INLINE static __m512 multiplied(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  DMUON_AVX512_INLINE static __m512 load(__mmask16 mask, const std::byte* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  DMUON_AVX512_INLINE static void store(std::byte* to, __mmask16 mask, __m512 value) {
    _mm256_mask_storeu_epi16(to, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
  }
  DMUON_AVX512_INLINE static __m512i word(__mmask16 mask, const std::byte* from,
                                          std::int64_t stride, bool has_second) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    if (!has_second) return low;
    const __m256i second = _mm256_maskz_loadu_epi16(mask, from + stride);
    return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
  }
};

struct Block {
  __m512i row[kLanes];
};

DMUON_AVX512_INLINE void transpose(Block& x) {
  Block y{};
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < 8; ++i) {
    y.row[2 * i] = _mm512_unpacklo_epi32(x.row[2 * i], x.row[2 * i + 1]);
    y.row[2 * i + 1] = _mm512_unpackhi_epi32(x.row[2 * i], x.row[2 * i + 1]);
  }
  // x[4 i + k] becomes column k of each quarter of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 4; ++i) {
    x.row[4 * i] = _mm512_unpacklo_epi64(y.row[4 * i], y.row[4 * i + 2]);
    x.row[4 * i + 1] = _mm512_unpackhi_epi64(y.row[4 * i], y.row[4 * i + 2]);
    x.row[4 * i + 2] = _mm512_unpacklo_epi64(y.row[4 * i + 1], y.row[4 * i + 3]);
    x.row[4 * i + 3] = _mm512_unpackhi_epi64(y.row[4 * i + 1], y.row[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < 4; ++k) {
    y.row[k] = _mm512_shuffle_i32x4(x.row[k], x.row[4 + k], 0x88);
    y.row[4 + k] = _mm512_shuffle_i32x4(x.row[8 + k], x.row[12 + k], 0x88);
    y.row[8 + k] = _mm512_shuffle_i32x4(x.row[k], x.row[4 + k], 0xdd);
    y.row[12 + k] = _mm512_shuffle_i32x4(x.row[8 + k], x.row[12 + k], 0xdd);
  }
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < 4; ++k) {
    x.row[k] = _mm512_shuffle_i32x4(y.row[k], y.row[4 + k], 0x88);
    x.row[4 + k] = _mm512_shuffle_i32x4(y.row[8 + k], y.row[12 + k], 0x88);
    x.row[8 + k] = _mm512_shuffle_i32x4(y.row[k], y.row[4 + k], 0xdd);
    x.row[12 + k] = _mm512_shuffle_i32x4(y.row[8 + k], y.row[12 + k], 0xdd);
  }
}

}  // namespace dmuon::kernels::cpu::avx512
